"""The generation service: sample, grade, write. It shares nothing with the learner but the store."""

from m2po_jax.generation.sampler import Responses, Sampler, Sampling, Work
from m2po_jax.generation.service import Generator
from m2po_jax.generation.worker import Worker

__all__ = ["Generator", "Responses", "Sampler", "Sampling", "Work", "Worker"]
