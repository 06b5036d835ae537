"""Making work units: which prompts, under which weights, into which shard; all of it follows from the run's numbers."""

import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from m2po_jax.config import Config
from m2po_jax.generation.engine import Streams, sampling_keys
from m2po_jax.generation.sampler import Responses, Sampler, Sampling
from m2po_jax.generation.scoring import score
from m2po_jax.models import Transformer
from m2po_jax.rollouts import Provenance, Rollouts, Store, UnitId, shard_path, weights, write_shard
from m2po_jax.tasks import Problem, Task, right_padded

_GROUPS_PER_VERSION = 2**32


class Begun(NamedTuple):
    """A unit that is being sampled."""

    unit: UnitId
    problems: list[Problem]
    sampled: Any
    """What the sampler has begun."""
    weights_digest: str
    params: Any
    """Of the version that samples it; kept to score it again."""
    since: float


@dataclass(frozen=True)
class Made:
    """A unit that has its shard."""

    first: bool
    """False if another producer was first with other content, which stands."""
    tokens: int
    """Sampled."""
    seconds: float
    """From the beginning of this unit, or the end of the one before it, to its end."""
    reward_mean: float
    mismatch: dict[str, float]
    """Behaviour log-probs against the learner's forward pass; empty where nothing was scored again."""


class Generator:
    """Makes the units of one run; any number of generators may make the same unit, and the first shard stays."""

    def __init__(
        self,
        store: Store,
        run_id: str,
        config: Config,
        task: Task,
        model: Transformer,
        abstract_params: Any = None,
        sampler: Sampling | None = None,
    ):
        """`store` is the run's; `config`, `task` and `model` must be those of its `config.json`.

        `abstract_params` says where the parameters lie; None: on the first device. `sampler` draws
        responses; None: the decode engine.
        """
        self.store, self.run_id, self.config, self.task = store, run_id, config, task
        self.model = model
        self.sampler = sampler or Sampler(task, model, config.sampling)
        self.producer = f"{socket.gethostname()}:{os.getpid()}"
        self._stream = Streams.of(config.seed).rollouts
        self._abstract = abstract_params or jax.eval_shape(model.init_params, jax.random.key(0))
        self._loaded: tuple[int, Any, str] | None = None
        self._ended = 0.0

    def missing(self, units: Sequence[UnitId]) -> list[UnitId]:
        """Those of `units` that have no shard yet."""
        return [unit for unit in units if not self.store.exists(shard_path(unit))]

    def make(self, units: Sequence[UnitId], share: int = 0, shares: int = 1) -> None:
        """Sample units and write every one, or every `shares`th from `share` on.

        Sampling of a unit runs while the one before it is graded and written. On several hosts, whose devices sample
        together, all make the same units, and each writes its share.
        """
        begun = [self.begin(unit) for unit in units]
        for each in begun[share::shares]:
            self.finish(each)

    def begin(self, unit: UnitId) -> Begun:
        """Start to sample a unit and return; raises UserError where its weights cannot be loaded."""
        since = time.perf_counter()
        params, digest = self._weights(unit.version)
        self.sampler.prepare(unit.version, digest, params)
        problems, sampled = self._start(unit, params)
        return Begun(unit, problems, sampled, digest, params, since)

    def finish(self, begun: Begun) -> Made:
        """Wait for a unit's responses, grade them, write the shard."""
        rollouts = self._rollouts(begun.unit, begun.problems, self.sampler.collect(begun.sampled, begun.problems))
        if self.config.rollouts.rescore:
            rollouts = replace(rollouts, rescored_logprobs=self._rescored(begun.params, rollouts))
        first = write_shard(self.store, rollouts, begun.unit, self.provenance(begun.weights_digest), self.producer)
        now = time.perf_counter()
        seconds = now - max(begun.since, self._ended)
        self._ended = now
        tokens = int(rollouts.response_lengths.sum())
        return Made(first, tokens, seconds, float(rollouts.rewards.mean()), mismatch(rollouts))

    def provenance(self, weights_digest: str) -> Provenance:
        """What a shard of this run made under those weights must state."""
        return Provenance(self.run_id, weights_digest, self.task.tokenizer.fingerprint)

    def _weights(self, version: int) -> tuple[Any, str]:
        """Parameters and digest of a version, read from the store; the last one is kept, keyed by its digest."""
        digest = weights.read_digest(self.store, version)
        if self._loaded is None or self._loaded[0] != version or self._loaded[2] != digest:
            self._loaded = (version, *weights.load(self.store, version, self._abstract))
        return self._loaded[1], self._loaded[2]

    def _start(self, unit: UnitId, params: Any) -> tuple[list[Problem], Any]:
        config = self.config
        problems = self.task.draw(config.rollouts.prompts_per_unit, (config.seed, unit.version, unit.batch, unit.unit))
        groups, samples = self._rows(unit)
        keys = sampling_keys(self._stream, np.uint32(unit.version), groups.astype(np.uint32), samples.astype(np.uint32))
        return problems, self.sampler.dispatch(params, problems, keys, config.rollouts.group_size)

    def _rescored(self, params: Any, rollouts: Rollouts) -> np.ndarray:
        """Log-probs of the sampled tokens by the forward pass of training, float32 (R, T)."""
        prompts = [row[:n] for row, n in zip(rollouts.prompt_tokens, rollouts.prompt_lengths, strict=True)]
        responses = [row[:n] for row, n in zip(rollouts.response_tokens, rollouts.response_lengths, strict=True)]
        widths = (self.task.max_prompt_tokens, rollouts.response_tokens.shape[1])
        return score(self.model, params, prompts, responses, widths, rollouts.temperature)

    def _rows(self, unit: UnitId) -> tuple[np.ndarray, np.ndarray]:
        """Draw number within the version and sample index of each row of a unit, int64 (R,)."""
        shape = self.config.rollouts
        first = unit.batch * shape.prompts_per_batch + unit.unit * shape.prompts_per_unit
        draws = np.arange(first, first + shape.prompts_per_unit, dtype=np.int64)
        return np.repeat(draws, shape.group_size), np.tile(np.arange(shape.group_size), shape.prompts_per_unit)

    def _rollouts(self, unit: UnitId, problems: list[Problem], responses: Responses) -> Rollouts:
        size = self.config.rollouts.group_size
        draws, samples = self._rows(unit)
        prompts = [self.task.prompt_tokens(problem) for problem in problems]
        prompt_tokens, prompt_valid = right_padded(prompts, self.task.max_prompt_tokens, self.task.tokenizer.pad_id)
        return Rollouts(
            prompt_tokens=np.repeat(prompt_tokens, size, axis=0),
            prompt_lengths=np.repeat(prompt_valid.sum(axis=1, dtype=np.int32), size),
            response_tokens=responses.tokens,
            response_lengths=responses.lengths,
            behavior_logprobs=responses.logprobs,
            rescored_logprobs=None,
            rewards=responses.scores,
            prompt_ids=[problem.prompt_id for problem in problems for _ in range(size)],
            group_ids=unit.version * _GROUPS_PER_VERSION + draws,
            sample_indices=samples.astype(np.int32),
            finish_reasons=responses.finish_reasons,
            response_texts=responses.texts,
            gold_answers=[problem.gold_answer for problem in problems for _ in range(size)],
            temperature=self.config.sampling.temperature,
            top_p=self.config.sampling.top_p,
        )


def mismatch(rollouts: Rollouts) -> dict[str, float]:
    """How far the behaviour log-probs lie from those scored again, over all response tokens; empty if none were.

    With d the scored minus the sampled log-prob: mean |d|, the largest |d|, and the k3 estimate of KL(sampled ||
    scored), the mean of exp(d) - 1 - d.
    """
    if rollouts.rescored_logprobs is None:
        return {}
    mask = np.arange(rollouts.response_tokens.shape[1]) < rollouts.response_lengths[:, None]
    differences = (rollouts.rescored_logprobs - rollouts.behavior_logprobs)[mask].astype(np.float64)
    return {
        "mismatch_mean": float(np.abs(differences).mean()),
        "mismatch_worst": float(np.abs(differences).max()),
        "mismatch_k3": float(np.mean(np.expm1(differences) - differences)),
    }
