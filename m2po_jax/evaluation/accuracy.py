"""Held-out accuracy: one sampled response to each held-out prompt, at the training temperature."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from m2po_jax.generation import Sampler
from m2po_jax.generation.engine import Streams, sampling_keys
from m2po_jax.tasks import Problem

_CHUNK = 512


@dataclass(frozen=True)
class Accuracy:
    """A measured share of right answers."""

    value: float
    """In [0, 1]."""
    prompts: int
    """Number of prompts behind it."""

    @property
    def standard_error(self) -> float:
        """Binomial standard error of `value`."""
        return math.sqrt(self.value * (1.0 - self.value) / self.prompts)


class HeldOut:
    """Evaluates policies of one run; the draw depends on (seed, version) and nothing else."""

    def __init__(self, sampler: Sampler, prompts: int, seed: int):
        """Chooses the same `prompts` held-out prompts in every run of a task; ConfigError if there are too few."""
        self.sampler = sampler
        self.problems = sampler.task.held_out(prompts)
        self._stream = Streams.of(seed).evaluation

    def accuracy(self, params: Any, version: int) -> Accuracy:
        """Sampled accuracy of `params`."""
        chunks = [self.problems[start : start + _CHUNK] for start in range(0, len(self.problems), _CHUNK)]
        right = sum(self._right(params, version, index * _CHUNK, chunk) for index, chunk in enumerate(chunks))
        return Accuracy(right / len(self.problems), len(self.problems))

    def _right(self, params: Any, version: int, first: int, problems: Sequence[Problem]) -> float:
        rows = np.arange(first, first + len(problems), dtype=np.uint32)
        keys = sampling_keys(self._stream, np.uint32(version), rows, np.zeros_like(rows))
        generated = self.sampler.dispatch(params, problems, keys, samples_per_prompt=1)
        return float(self.sampler.collect(generated, problems).scores.sum())
