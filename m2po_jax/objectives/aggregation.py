"""From a loss for each token to one number: what is averaged over what. Denominators are counts of the whole batch.

    token_mean      1 / (number of tokens) * sum_i sum_t loss_it                    every token counts alike
    sequence_mean   1 / (number of responses) * sum_i 1 / |o_i| * sum_t loss_it     every response counts alike
    constant_sum    1 / (number of responses * constant) * sum_i sum_t loss_it      no length in the denominator

|o_i| and the number of tokens count masked tokens too; a response without tokens is no response. The three are those
of DAPO (arXiv 2503.14476, equation 8), of GRPO (arXiv 2402.03300, equation 3) and of Dr. GRPO (arXiv 2503.20783).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import jax.numpy as jnp
import tyro
from jaxtyping import Array, Float

from m2po_jax.config import ConfigError
from m2po_jax.objectives.tokens import MAX_EXPONENT, Counts, response_lengths

Aggregation = Literal["token_mean", "sequence_mean", "constant_sum"]
Estimator = Literal["k1", "k2", "k3"]
MaskScope = Literal["minibatch", "microbatch"]


@dataclass(frozen=True)
class LossConfig:
    """What every objective can be told."""

    aggregation: Aggregation = "token_mean"
    """How the losses of tokens become one."""
    length_constant: Annotated[float, tyro.conf.Suppress] = 1.0
    """Stands for the response length in `constant_sum`."""
    kl_coefficient: float = 0.0
    """Weight of the KL penalty towards the reference policy (the base policy in a run); 0 for none, as in the paper."""
    kl_estimator: Estimator = "k3"
    """Estimator of KL(policy || reference) in the penalty."""

    def __post_init__(self):
        if not self.length_constant > 0.0:
            raise ConfigError(f"objective.length_constant is {self.length_constant}: use a positive number")
        if not self.kl_coefficient >= 0.0:
            raise ConfigError(f"objective.kl_coefficient is {self.kl_coefficient}: use 0 or more")


@dataclass(frozen=True)
class MaskConfig(LossConfig):
    """What the objectives with a second-moment mask can be told."""

    threshold: float = 0.04
    """tau, the bound on the mean second moment of what is kept; 0.04 in all of the paper's experiments."""
    mask_scope: MaskScope = "minibatch"
    """The tokens that one mask looks at: all of an update's, or each micro-batch's own, as in the authors' code."""

    def __post_init__(self):
        super().__post_init__()
        if not self.threshold >= 0.0:
            raise ConfigError(f"objective.threshold is {self.threshold}: the second-moment threshold is 0 or more")


def token_weights(config: LossConfig, response_mask: Array, counts: Counts) -> Float[Array, "B 1"]:
    """Weight of a token of each response, with which the losses of all parts of a batch add up to the whole.

    Args:
      response_mask: (B, T) bool, whole responses of one part of the batch.
      counts: of the whole batch.
    """
    rows = (response_mask.shape[0], 1)
    sequences = jnp.maximum(counts.sequences.astype(jnp.float32), 1.0)
    if config.aggregation == "token_mean":
        return jnp.broadcast_to(1.0 / jnp.maximum(counts.tokens.astype(jnp.float32), 1.0), rows)
    if config.aggregation == "sequence_mean":
        return 1.0 / (sequences * response_lengths(response_mask))
    return jnp.broadcast_to(1.0 / (sequences * config.length_constant), rows)


def kl_penalty(estimator: Estimator, log_ratio_BT: Array) -> Float[Array, "B T"]:
    """Estimates of KL(policy || reference) from tokens that the policy sampled, log r = log policy - log reference.

    k1 = log r;  k2 = (log r)^2 / 2;  k3 = 1 / r - 1 + log r  (J. Schulman, "Approximating KL divergence", 2020).
    The gradient is that of the written expression: of k1 it is the score alone, whose mean is 0 on policy; of k2 it is
    that of the divergence; k3 is GRPO's. Below log r = -20 k3 is constant, and has no gradient.
    """
    if estimator == "k1":
        return log_ratio_BT
    if estimator == "k2":
        return 0.5 * log_ratio_BT**2
    log_ratio_BT = jnp.where(log_ratio_BT > -MAX_EXPONENT, log_ratio_BT, -MAX_EXPONENT)
    return jnp.expm1(-log_ratio_BT) + log_ratio_BT
