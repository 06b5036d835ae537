"""SAPO: a soft gate in place of a clip (arXiv 2511.20347).

    J = 1 / (number of responses) * sum_i 1 / |o_i| * sum_t f(r_it) A_it
    f(r) = (4 / tau) sigmoid(tau (r - 1)),    tau = tau_positive where A > 0, tau_negative elsewhere

The slope of f is 1 on policy and falls on both sides of it, faster for a larger tau. Defaults from the paper.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from m2po_jax.config import ConfigError
from m2po_jax.objectives.aggregation import Aggregation, LossConfig
from m2po_jax.objectives.tokens import TokenLoss, Tokens, ratio_minus_one_of


@dataclass(frozen=True)
class SAPOConfig(LossConfig):
    """Hyperparameters of `sapo`."""

    aggregation: Aggregation = "sequence_mean"
    """How the losses of tokens become one."""
    tau_positive: float = 1.0
    """Steepness of the gate where the advantage is positive."""
    tau_negative: float = 1.05
    """Steepness of the gate elsewhere; larger, so that tokens pushed down fade sooner."""

    def __post_init__(self):
        super().__post_init__()
        for name in ("tau_positive", "tau_negative"):
            if not getattr(self, name) > 0.0:
                raise ConfigError(f"objective.{name} is {getattr(self, name)}: use a positive number")


def token_loss(config: SAPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """-f(r) A of each token; none is dropped."""
    tau = jnp.where(tokens.advantages > 0.0, config.tau_positive, config.tau_negative)
    gate_BT = 4.0 / tau * jax.nn.sigmoid(tau * ratio_minus_one_of(tokens.log_ratio))
    return TokenLoss(jnp.where(tokens.usable, -gate_BT * tokens.advantages, 0.0), tokens.usable)
