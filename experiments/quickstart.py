"""Prosperity before collapse, on a laptop: four arms from one base policy (figure 1 of arXiv 2510.01161, small).

Command:   make quickstart, or m2po sweep experiments/quickstart.py --runs runs/quickstart --seeds 7 8 9
Hardware:  2 CPU cores, under 3 GB; see README.md for the minutes.
Expect:    the table in README.md (3 seeds, paired intervals).

Four digits are added by 0.08 M parameters; 64 prompts x 8 responses and 4 updates a batch; 5 x 256 updates; one
learning-rate schedule for all arms, chosen on seeds 0 to 5. The base policy has learned from a student who slips at
0.3 of the steps, so it cannot do better than 0.7^3 = 0.34; at 0.33 it knows how to add.
"""

from dataclasses import replace

from m2po_jax.config import Config, ObjectiveConfig, StalenessConfig, WarmStartConfig

BASE = Config(warm_start=WarmStartConfig(target_accuracy=0.33))


def configs() -> tuple[Config, ...]:
    """GRPO on policy, then M2PO, GRPO and GRPO without a trust region at staleness 256."""
    return (
        _arm("grpo-s0", "grpo", 0),
        _arm("m2po-s256", "m2po", 256),
        _arm("grpo-s256", "grpo", 256),
        _arm("grpo-no-tr-s256", "grpo_no_tr", 256),
    )


def _arm(name: str, objective: str, k: int) -> Config:
    return replace(BASE, name=name, objective=ObjectiveConfig(name=objective), staleness=StalenessConfig(k=k))
