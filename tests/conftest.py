"""Eight virtual CPU devices, strict arithmetic, reproducible examples: the same for every test of the package."""

import gc
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

USER_ENVIRONMENT = dict(os.environ)
# Read when JAX first asks for its devices, so it is set before anything imports JAX.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import hypothesis  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from tests.gcs import Serving, serving  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# The first call of a jitted function compiles, so a deadline would measure the compiler.
hypothesis.settings.register_profile("default", deadline=None, max_examples=50)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=50, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


_MOST_MAPPINGS = 25_000
"""Linux lets a process have 65,530 memory mappings by default, and every compiled program takes some for good."""
_MAPPINGS = Path("/proc/self/maps")


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Drop compiled programs before they use up what the system allows: the next compilation would crash."""
    item.config.stash[_TESTS_RUN] = item.config.stash.get(_TESTS_RUN, 0) + 1
    if item.config.stash[_TESTS_RUN] % 10 == 0 and _MAPPINGS.exists():
        with _MAPPINGS.open("rb") as lines:
            mappings = sum(1 for _ in lines)
        if mappings > _MOST_MAPPINGS:
            jax.clear_caches()
            gc.collect()


_TESTS_RUN = pytest.StashKey[int]()


@pytest.fixture
def rng() -> np.random.Generator:
    """A NumPy generator that starts alike in every test."""
    return np.random.default_rng(0)


@pytest.fixture
def devices() -> list[jax.Device]:
    """The eight virtual CPU devices."""
    return jax.devices("cpu")


@pytest.fixture
def no_implicit_transfers() -> Iterator[None]:
    """Refuse transfers between host and device that the code under test does not ask for by name."""
    with jax.transfer_guard("disallow"):
        yield


@pytest.fixture(scope="module")
def standard_promotion() -> Iterator[None]:
    """JAX's standard dtype promotion, for modules that run Optax: its Adam raises a float to an integer count."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def gcs_process() -> Iterator[Serving]:
    """An object store like Google's, in memory, in a process of its own."""
    with serving("forbidden-bucket") as server:
        yield server


@pytest.fixture
def gcs(gcs_process: Serving, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serving]:
    """That store without faults, and gs:// means it in this process and in those that it starts."""
    for name, value in gcs_process.environment.items():
        monkeypatch.setenv(name, value)
    gcs_process.faults(share=0.0, away_s=0, seed=0, reset=True)
    yield gcs_process
    gcs_process.faults(share=0.0, away_s=0)


@pytest.fixture(scope="session")
def user_env() -> dict[str, str]:
    """The environment for a subprocess as a user would start it: one CPU device, none of the settings above."""
    return {**USER_ENVIRONMENT, "JAX_PLATFORMS": "cpu"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Callable[[int], bool]]]:
    """A file system of its own, and a function that gives it a size in KiB."""
    root = tmp_path / "disk"
    root.mkdir()
    if shutil.which("mount") is None or not _mount(root, "size=200k"):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield root, lambda size_kib: _mount(root, f"remount,size={size_kib}k")
    subprocess.run(["umount", "-l", str(root)], check=True)


def _mount(root: Path, options: str) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(root)]
    return subprocess.run(command, capture_output=True).returncode == 0
