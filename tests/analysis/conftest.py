"""Two small finished arms of two seeds, and what goes with them."""

from pathlib import Path

import pytest

from tests.analysis.synthetic import make_run


@pytest.fixture(scope="session")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `grpo-s0` and `m2po-s256`, seeds 0 and 1, 64 updates each: not to be changed by a test."""
    root = tmp_path_factory.mktemp("outer") / "sweep"
    for arm, gain in (("grpo-s0", 0.4), ("m2po-s256", 0.3)):
        for seed in (0, 1):
            make_run(root / f"{arm}-seed{seed}", arm, seed, gain + 0.02 * seed)
    return root
