"""Prosperity before collapse, on a laptop: four arms from one base policy (figure 1 of arXiv 2510.01161, small).

Command:   make quickstart, or m2po sweep experiments/quickstart.py --runs runs/quickstart
Hardware:  2 CPU cores, under 3 GB; about 8 minutes for one seed.
Expect:    see the table in README.md (3 seeds, paired intervals).
"""

from dataclasses import replace

from m2po_jax.config import Config, LearnerConfig, ObjectiveConfig, StalenessConfig

BASE = Config(learner=LearnerConfig(total_updates=1280))


def configs() -> tuple[Config, ...]:
    """GRPO on policy, then GRPO, no trust region and M2PO at staleness 256."""
    return (
        _arm("grpo-s0", "grpo", 0),
        _arm("m2po-s256", "m2po", 256),
        _arm("grpo-s256", "grpo", 256),
        _arm("grpo-no-tr-s256", "grpo_no_tr", 256),
    )


def _arm(name: str, objective: str, k: int) -> Config:
    return replace(BASE, name=name, objective=ObjectiveConfig(name=objective), staleness=StalenessConfig(k=k))
