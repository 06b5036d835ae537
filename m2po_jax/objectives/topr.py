"""TOPR: tapered off-policy REINFORCE, with one truncated weight a response (arXiv 2503.14286).

    J = 1 / (number of tokens) * sum_i stop_gradient(w_i) sum_t A_it log pi(o_it)
    w_i = 1 where A > 0,    min(prod_t r_it, cap) where A < 0

With the paper's truncation to [0, 1]: good responses are imitated whatever their weight, bad ones are pushed down
only as far as the policy still writes them. The paper averages over responses; `aggregation` says over what here.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import LossConfig
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_of, weighted_log_likelihood_loss


@dataclass(frozen=True)
class TOPRConfig(LossConfig):
    """Hyperparameters of `topr`."""

    cap: float = 1.0
    """Largest weight of a response with a negative advantage."""

    def __post_init__(self):
        super().__post_init__()
        if not self.cap > 0.0:
            raise ConfigError(f"objective.cap is {self.cap}: use a positive number")


def token_loss(config: TOPRConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """-w_i A log pi(o_t) of each token; none is dropped, but a weight may be as good as 0."""
    log_weight_B1 = jnp.sum(tokens.log_ratio, axis=1, keepdims=True)
    tapered_B1 = ratio_of(jnp.minimum(log_weight_B1, math.log(config.cap)))
    loss_BT = weighted_log_likelihood_loss(tokens, jnp.where(tokens.advantages < 0.0, tapered_B1, 1.0))
    return TokenLoss(jnp.where(tokens.usable, loss_BT, 0.0), tokens.usable)
