import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from m2po_jax.rollouts import Provenance, Rollouts, Store, UnitId

ROOT = Path(__file__).parents[2]


def _make_rollouts(groups=2, size=4, seed=0, first_group=0, rescored=False, longest=6) -> Rollouts:
    rng = np.random.default_rng(seed)
    rows = groups * size
    prompt_lengths = np.repeat(rng.integers(1, 9, groups), size).astype(np.int32)
    response_lengths = rng.integers(1, longest + 1, rows).astype(np.int32)
    prompt_mask = np.arange(prompt_lengths.max()) < prompt_lengths[:, None]
    mask = np.arange(longest) < response_lengths[:, None]

    def logprobs():
        return np.where(mask, -rng.exponential(size=mask.shape), 0).astype(np.float32)

    return Rollouts(
        prompt_tokens=np.where(prompt_mask, rng.integers(0, 15, prompt_mask.shape), 0).astype(np.int32),
        prompt_lengths=prompt_lengths,
        response_tokens=np.where(mask, rng.integers(0, 15, mask.shape), 0).astype(np.int32),
        response_lengths=response_lengths,
        behavior_logprobs=logprobs(),
        rescored_logprobs=logprobs() if rescored else None,
        rewards=rng.integers(0, 2, rows).astype(np.float32),
        prompt_ids=[f"add-{row // size}" for row in range(rows)],
        group_ids=np.repeat(np.arange(first_group, first_group + groups), size).astype(np.int64),
        sample_indices=np.tile(np.arange(size), groups).astype(np.int32),
        finish_reasons=[("stop", "length")[i] for i in rng.integers(0, 2, rows)],
        response_texts=[f"{i},é\n" * (i % 3) for i in rng.integers(0, 100, rows)],
        gold_answers=[str(i) for i in rng.integers(0, 100, rows)],
        temperature=0.7,
        top_p=1.0,
    )


@pytest.fixture(scope="session")
def make_rollouts():
    """Builds valid rollouts from a seed."""
    return _make_rollouts


@pytest.fixture(scope="session")
def unit() -> UnitId:
    return UnitId(version=8, batch=3, unit=1)


@pytest.fixture(scope="session")
def provenance() -> Provenance:
    return Provenance(run_id="run", weights_digest="weights", tokenizer_fingerprint="tokenizer")


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


@pytest.fixture
def start():
    """Starts a Python script in a process of its own; whatever is left at the end of the test is killed."""
    running = []

    def start(script: str, *arguments) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def equal():
    """Asserts that two Rollouts hold the same rows."""

    def equal(a: Rollouts, b: Rollouts) -> None:
        widths = [max(getattr(r, name).shape[1] for r in (a, b)) for name in ("prompt_tokens", "response_tokens")]
        a, b = a.padded(*widths), b.padded(*widths)
        for name, value in vars(a).items():
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(value, getattr(b, name), err_msg=name)
                assert value.dtype == getattr(b, name).dtype, name
            else:
                assert value == getattr(b, name), name

    return equal


@pytest.fixture
def small_disk(small_disk):
    """A store on a file system of its own with 256 KiB."""
    root, resize = small_disk
    assert resize(256)
    return Store.open(root)
