"""An objective: statistics of the whole batch, a loss for each token, a sum with weights that are passed in."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Integer

from m2po_jax.objectives.advantages import Normalization
from m2po_jax.objectives.aggregation import LossConfig, MaskConfig, kl_penalty, token_weights
from m2po_jax.objectives.checks import checked
from m2po_jax.objectives.metrics import Metrics, measure
from m2po_jax.objectives.tokens import Counts, TokenLoss, Tokens, counts_of, prepare

Floats_BT = Float[Array | np.ndarray, "B T"]
Ints_B = Integer[Array | np.ndarray, "B"]


def no_statistics(config: Any, tokens: Tokens) -> tuple[()]:
    """The batch statistics of an objective that looks at one token (or response) at a time."""
    return ()


class Definition(NamedTuple):
    """A row of the objectives table: the pure pieces, each a function of the objective's own config."""

    config: type[LossConfig]
    """Frozen dataclass of hyperparameters, checked in `__post_init__`."""
    token_loss: Callable[[Any, Tokens, Any], TokenLoss]
    """(config, tokens, statistics) -> loss (B, T), 0 off the usable tokens; kept (B, T)."""
    statistics: Callable[[Any, Tokens], Any] = no_statistics
    """(config, tokens of the whole optimiser batch) -> pytree that every token's loss may depend on."""
    proximal: bool = False
    """Whether the learner is to score each batch under the policy of its first update."""
    normalize_advantages: Normalization = "std"
    """How the paper that defines it normalises group advantages."""


@dataclass(frozen=True)
class Objective:
    """A pure function of log-probs, advantages and mask, with its hyperparameters; hashable, so static under jit.

    Called, it takes a batch that fits. For one that does not, call the pieces: `statistics` and `counts_of` once for
    the whole optimiser batch, `partial_loss` on each part, and `measure` on the whole; the losses add up.
    """

    name: str
    config: Any
    definition: Definition

    @checked
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
        staleness: Ints_B | None = None,
        finish_reason: Ints_B | Bool[Array | np.ndarray, "B"] | None = None,
    ) -> tuple[Float[Array, ""], Metrics]:
        """Loss to minimise and metrics.

        Args:
          policy_logprobs: (B, T) float, of the policy being trained; differentiable.
          behavior_logprobs: (B, T) float, of the policy that sampled the tokens.
          advantages: (B, 1) or (B, T) float.
          response_mask: (B, T) bool, True for response tokens.
          proximal_logprobs: (B, T) float, of the policy in the middle of `decoupled_ppo`, `tis`, `icepop` and
            `m2po_all_tokens`; the behaviour policy where it is not given.
          reference_logprobs: (B, T) float, of the policy that the KL penalty pulls towards.
          entropy: (B, T) float, nats, of the policy's distribution at each token; for the metrics.
          staleness: (B,) int, age of each response in model updates; for the metrics.
          finish_reason: (B,) 0 or False for a response that ended, 1 or True for one that was cut by length.

        Returns:
          Float32 scalar and a flat dict of float32 arrays, described in `metrics`.

        Raises:
          TypeError: a shape or dtype is wrong; the message names the argument.
          ValueError: a KL penalty without `reference_logprobs`.
        """
        tokens = self.tokens(
            policy_logprobs,
            behavior_logprobs,
            advantages,
            response_mask,
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
            finish_reason=finish_reason,
        )
        loss, kept_BT = self.partial_loss(tokens, self.statistics(tokens), counts_of(tokens))
        return loss, measure(tokens, kept_BT, loss, entropy=entropy, staleness=staleness)

    def tokens(
        self,
        policy_logprobs: Any,
        behavior_logprobs: Any,
        advantages: Any,
        response_mask: Any,
        *,
        proximal_logprobs: Any = None,
        reference_logprobs: Any = None,
        finish_reason: Any = None,
    ) -> Tokens:
        """The batch as this objective sees it: without the log-probs that it has no use for.

        Arguments as for a call. Raises ValueError for a KL penalty without `reference_logprobs`.
        """
        has_penalty = self.config.kl_coefficient > 0.0
        if has_penalty and reference_logprobs is None:
            raise ValueError(
                f"objective {self.name} has kl_coefficient {self.config.kl_coefficient:g}, and so needs"
                " reference_logprobs of shape (B, T)"
            )
        return prepare(
            policy_logprobs,
            behavior_logprobs,
            advantages,
            response_mask,
            proximal_logprobs=proximal_logprobs if self.definition.proximal else None,
            reference_logprobs=reference_logprobs if has_penalty else None,
            finish_reason=finish_reason,
        )

    @property
    def needs_whole_batch(self) -> bool:
        """Whether a token's loss depends on the whole optimiser batch, so that parts need its statistics first."""
        by_parts = isinstance(self.config, MaskConfig) and self.config.mask_scope == "microbatch"
        return self.definition.statistics is not no_statistics and not by_parts

    def statistics(self, tokens: Tokens) -> Any:
        """Statistics of the whole optimiser batch (a pytree, constant for the gradient)."""
        return self.definition.statistics(self.config, tokens)

    def token_loss(self, tokens: Tokens, statistics: Any) -> TokenLoss:
        """Loss of each token with its KL penalty, and what is kept."""
        loss_BT, kept_BT = self.definition.token_loss(self.config, tokens, statistics)
        if tokens.reference_log_ratio is None:
            return TokenLoss(loss_BT, kept_BT)
        penalty_BT = self.config.kl_coefficient * kl_penalty(self.config.kl_estimator, tokens.reference_log_ratio)
        return TokenLoss(loss_BT + jnp.where(tokens.usable, penalty_BT, 0.0), kept_BT)

    def partial_loss(self, tokens: Tokens, statistics: Any, counts: Counts) -> tuple[Array, Array]:
        """The share of the loss of one part of the batch, and what of it is kept, (B, T).

        Args:
          tokens: whole responses of the part.
          statistics: of the whole batch.
          counts: of the whole batch.
        """
        loss_BT, kept_BT = self.token_loss(tokens, statistics)
        weights_B1 = token_weights(self.config, tokens.response_mask, counts)
        return jnp.sum(weights_B1[:, 0] * jnp.sum(loss_BT, axis=1)), kept_BT

    @checked
    def kept(
        self,
        policy_logprobs: Floats_BT,
        behavior_logprobs: Floats_BT,
        advantages: Float[Array | np.ndarray, "B #T"],
        response_mask: Bool[Array | np.ndarray, "B T"],
        *,
        proximal_logprobs: Floats_BT | None = None,
        reference_logprobs: Floats_BT | None = None,
        finish_reason: Ints_B | Bool[Array | np.ndarray, "B"] | None = None,
    ) -> Bool[Array, "B T"]:
        """True where the token's gradient passes: a response token, not masked and not on the active clip branch."""
        tokens = self.tokens(
            policy_logprobs,
            behavior_logprobs,
            advantages,
            response_mask,
            proximal_logprobs=proximal_logprobs,
            reference_logprobs=reference_logprobs,
            finish_reason=finish_reason,
        )
        return self.definition.token_loss(self.config, tokens, self.statistics(tokens)).kept
