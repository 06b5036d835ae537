"""The trust region, the second moment, and the mask of Algorithm 1 (arXiv 2510.01161)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from m2po_jax.objectives.checks import checked
from m2po_jax.objectives.cutoffs import SECOND_MOMENT_LIMIT, mask_cut

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@checked
def second_moment_mask(
    log_ratio: Float[Array | np.ndarray, "B T"],
    advantages: Float[Array | np.ndarray, "B #T"],
    response_mask: Bool[Array | np.ndarray, "B T"],
    threshold: ArrayLike,
) -> Bool[Array, "B T"]:
    """Algorithm 1: drop the largest second moments of the trust region until their mean is within the threshold.

    T = {A > 0 and log r > 0, or A < 0 and log r < 0};  while mean over T of (log r)^2 > tau: mask its largest tokens.
    "Prosperity before Collapse" (arXiv 2510.01161), Algorithm 1. Equal values are kept or masked together, so the mask
    does not depend on the order of tokens.

    Args:
      log_ratio: policy minus behaviour log-probs, (B, T); read as float32, squared in float32.
      advantages: (B, T), or (B, 1) for one value a response.
      response_mask: (B, T) bool, True for response tokens.
      threshold: scalar tau >= 0, read as float32.

    Returns:
      (B, T) bool, True where the token is kept; False on padding and where the log-ratio is NaN or infinite (such
      tokens count in no statistic). Constant for the gradient.

    Raises:
      TypeError: a shape or dtype is wrong (the message names the argument).
      ValueError: the threshold is negative or NaN. A traced threshold cannot be checked: NaN masks all of T.

    Note: subnormal log-ratios and squares count as 0, which is what accelerators make of them; squares above 2^96 count
    as 2^96. See `cutoffs` for the accuracy of the decision.
    """
    log_ratio_BT = as_float32(log_ratio)
    usable_BT = jnp.asarray(response_mask) & jnp.isfinite(log_ratio_BT)
    log_ratio_BT = jnp.where(usable_BT, log_ratio_BT, 0.0)
    trust_region_BT = trust_region(log_ratio_BT, as_float32(advantages))
    second_moment_BT = second_moment(log_ratio_BT)
    cut = mask_cut(second_moment_BT, trust_region_BT, checked_threshold(threshold))
    return usable_BT & ~(trust_region_BT & cut.masks(second_moment_BT))


def trust_region(log_ratio_BT: Array, advantages: Array) -> Bool[Array, "B T"]:
    """T: the tokens that an update pushes further from the behaviour policy; log-ratio 0 or advantage 0 never is."""
    up_BT = (advantages >= _SMALLEST_NORMAL) & (log_ratio_BT >= _SMALLEST_NORMAL)
    down_BT = (advantages <= -_SMALLEST_NORMAL) & (log_ratio_BT <= -_SMALLEST_NORMAL)
    return up_BT | down_BT


def second_moment(log_ratio_BT: Array) -> Float[Array, "B T"]:
    """(log r)^2 in float32, constant for the gradient; subnormal squares are 0 and huge ones SECOND_MOMENT_LIMIT."""
    log_ratio_BT = lax.stop_gradient(log_ratio_BT)
    square_BT = jnp.minimum(log_ratio_BT * log_ratio_BT, SECOND_MOMENT_LIMIT)
    return jnp.where(square_BT >= _SMALLEST_NORMAL, square_BT, 0.0)


def checked_threshold(threshold: ArrayLike) -> Float[Array, ""]:
    """The threshold as a float32 scalar; ValueError where it is known to be negative or NaN."""
    if not isinstance(threshold, jax.core.Tracer):
        array = np.asarray(threshold)
        if array.dtype.kind not in "fiuV" or not bool(np.all(array.astype(np.float64) >= 0.0)):
            raise ValueError(f"threshold is {threshold}: the second-moment threshold is a number, 0 or more")
    scalar = as_float32(threshold)
    if scalar.ndim:
        raise ValueError(f"threshold has shape {scalar.shape}: use a scalar")
    return scalar


def as_float32(x: ArrayLike) -> Array:
    """The array in float32, in which all of the objectives' arithmetic runs."""
    return jnp.asarray(x).astype(jnp.float32)
