"""GSPO: group sequence policy optimisation (arXiv 2507.18071), clipped by whole responses.

    s_i = exp(mean_t log r_it)                                                   (geometric mean of the token ratios)
    J   = 1 / (number of responses) * sum_i min(s_i A_i, clip(s_i, 1 - eps_low, 1 + eps_high) A_i)

Each token carries its share of its response's term, so that the terms of a response add up to it; with advantages that
differ within a response this is the paper's GSPO-token with an undetached ratio.
"""

from dataclasses import dataclass

from m2po_jax.objectives.aggregation import Aggregation
from m2po_jax.objectives.clipping import ClipConfig, clipped_loss
from m2po_jax.objectives.tokens import TokenLoss, Tokens, response_mean


@dataclass(frozen=True)
class GSPOConfig(ClipConfig):
    """Clip range of the sequence ratio; the defaults are those of GSPO's paper, section 5.1."""

    aggregation: Aggregation = "sequence_mean"
    """How the losses of tokens become one."""
    epsilon_low: float = 3e-4
    """The sequence ratio is clipped below at 1 - epsilon_low."""
    epsilon_high: float = 4e-4
    """The sequence ratio is clipped above at 1 + epsilon_high."""


def token_loss(config: GSPOConfig, tokens: Tokens, statistics: tuple[()]) -> TokenLoss:
    """Each token's share of its response's clipped loss, and where the gradient of the response passes."""
    return clipped_loss(config, tokens, response_mean(tokens.log_ratio, tokens))
