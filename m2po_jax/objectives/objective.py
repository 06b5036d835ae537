"""An objective: statistics of the whole batch, a loss for each token, a sum over a denominator that is passed in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from beartype import beartype
from jaxtyping import Array, Bool, Float, Shaped, jaxtyped

from m2po_jax.objectives import metrics as metric_parts
from m2po_jax.objectives.metrics import MetricParts, Metrics
from m2po_jax.objectives.tokens import Tokens, prepare

Floats_BT = Float[Array | np.ndarray, "B T"]


class Definition(NamedTuple):
    """A row of the objectives table: the pure pieces, each a function of the objective's own config."""

    config: type
    """Frozen dataclass of float hyperparameters, checked in `__post_init__`."""
    statistics: Callable[[Any, Tokens], Any]
    """(config, tokens of the whole optimiser batch) -> pytree that every token's loss may depend on."""
    token_loss: Callable[[Any, Tokens, Any], tuple[Array, Array]]
    """(config, tokens, statistics) -> loss (B, T), 0 off the mask; kept (B, T), True where the gradient passes."""
    denominator: Callable[[Tokens], Array]
    """tokens -> the count that the summed loss is divided by; counts of the parts of a batch add up."""


@dataclass(frozen=True)
class Objective:
    """A pure function of log-probs, advantages and mask, with its hyperparameters; hashable, so static under jit.

    Called, it takes a batch that fits. For one that does not, call the pieces: `statistics` and `denominator` once for
    the whole optimiser batch, then `partial_loss` on each part; losses and metric parts add up to those of the whole.
    """

    name: str
    config: Any
    definition: Definition

    @jaxtyped(typechecker=beartype)
    def __call__(
        self,
        policy_logprobs: Floats_BT,
        behavior_logprobs: Floats_BT,
        advantages: Float[Array | np.ndarray, "B #T"],
        response_mask: Bool[Array | np.ndarray, "B T"],
        *,
        proximal_logprobs: Floats_BT | None = None,
        reference_logprobs: Floats_BT | None = None,
        entropy: Floats_BT | None = None,
        staleness: Shaped[Array | np.ndarray, "B ..."] | None = None,
        finish_reason: Shaped[Array | np.ndarray, "B ..."] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss to minimise and metrics.

        Args:
          policy_logprobs: (B, T) float, of the policy being trained; differentiable.
          behavior_logprobs: (B, T) float, of the policy that sampled the tokens.
          advantages: (B, 1) or (B, T) float.
          response_mask: (B, T) bool, True for response tokens.
          proximal_logprobs, reference_logprobs, entropy, staleness, finish_reason: for the objectives that are defined
            with them; no objective in this table is, and these leave the result alone.

        Returns:
          Float32 scalar and a flat dict of float32 scalars, described in `metrics.finish`.

        Raises:
          TypeError: a shape or dtype is wrong; the message names the argument.
        """
        tokens = prepare(policy_logprobs, behavior_logprobs, advantages, response_mask)
        loss, parts = self.partial_loss(tokens, self.statistics(tokens), self.denominator(tokens))
        return loss, metric_parts.finish(parts)

    def statistics(self, tokens: Tokens) -> Any:
        """Statistics of the whole optimiser batch (a pytree, constant for the gradient)."""
        return self.definition.statistics(self.config, tokens)

    def denominator(self, tokens: Tokens) -> Array:
        """Count of what the loss is a mean of: response tokens, or responses."""
        return self.definition.denominator(tokens)

    def partial_loss(self, tokens: Tokens, statistics: Any, denominator: Array) -> tuple[Array, MetricParts]:
        """The share of the loss, and of the metrics, of one part of the batch.

        Args:
          tokens: whole responses of the part.
          statistics: of the whole batch.
          denominator: count over the whole batch.
        """
        loss_BT, kept_BT = self.definition.token_loss(self.config, tokens, statistics)
        loss = jnp.sum(loss_BT) / jnp.maximum(denominator.astype(jnp.float32), 1.0)
        return loss, metric_parts.measure(tokens, kept_BT, loss)

    @jaxtyped(typechecker=beartype)
    def kept(
        self,
        policy_logprobs: Floats_BT,
        behavior_logprobs: Floats_BT,
        advantages: Float[Array | np.ndarray, "B #T"],
        response_mask: Bool[Array | np.ndarray, "B T"],
    ) -> Bool[Array, "B T"]:
        """True where the token's gradient passes: a response token, not masked and not on the active clip branch."""
        tokens = prepare(policy_logprobs, behavior_logprobs, advantages, response_mask)
        return self.definition.token_loss(self.config, tokens, self.statistics(tokens))[1]
