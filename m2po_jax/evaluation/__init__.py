"""How good a policy is on prompts that training never draws."""

from m2po_jax.evaluation.accuracy import Accuracy, HeldOut

__all__ = ["Accuracy", "HeldOut"]
