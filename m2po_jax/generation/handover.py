"""Weights for a server: a Hugging Face directory a version, and how the server is told to load it."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m2po_jax.config import ModelConfig
from m2po_jax.generation.server import Server, ServerError, said
from m2po_jax.models import huggingface
from m2po_jax.rollouts import held

CURRENT = "current"
"""The link to the version that is to be served."""
KEPT = 2
"""Versions kept on the disk, that being served among them."""


class Handover:
    """The directory in which versions lie, for one server and one generator."""

    def __init__(self, directory: Path, config: ModelConfig, source: str | None, server: Server, command: str | None):
        """`source` has tokenizer and chat template, which are copied; `command` makes the server load `current`.

        Without a command it is vLLM's own interface that does, which vLLM offers with VLLM_SERVER_DEV_MODE=1.
        """
        self.directory, self._config, self._source = directory.expanduser().absolute(), config, source
        self._server, self._command = server, command

    @property
    def current(self) -> Path:
        """What a server is to be started with."""
        return self.directory / CURRENT

    @property
    def advice(self) -> str:
        """What to do about a server that does not have what it was told to load."""
        if self._command is None and self._config.tie_embeddings:
            return (
                "The model has tied embeddings, and vLLM on CPUs keeps the output embedding it started with: restart it"
                " for each version, with --server.reload COMMAND"
            )
        return f"It must serve {self.current}"

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the directory for one generator; UserError where another has it."""
        self.directory.mkdir(parents=True, exist_ok=True)
        taken = (
            f"another generator hands weights over in {self.directory}: each needs a server of its own, and another"
            " --server.directory"
        )
        with held(self.directory / ".lock", taken):
            for left in self.directory.glob(".exporting-*"):  # by a generator that was killed
                shutil.rmtree(left, ignore_errors=True)
            yield

    def write(self, version: int, digest: str, params: Any) -> Path:
        """Write a version, whole or not at all, and point `current` to it; in the dtype of the forward pass."""
        out = self.directory / f"{version:07d}-{digest[:12]}"
        if not out.exists():
            huggingface.export(params, self._config, self._source, out, self._config.compute_dtype)
        link = self.directory / f".{CURRENT}"
        link.unlink(missing_ok=True)
        link.symlink_to(out.name)
        link.rename(self.current)
        versions = sorted((each for each in self.directory.glob("[0-9]*-*") if each != out), key=_changed)
        for old in versions[: max(len(versions) - KEPT + 1, 0)]:
            shutil.rmtree(old, ignore_errors=True)
        return out

    def load(self, directory: Path) -> None:
        """Have the server load a directory; it may need a while after this returns, where a command restarts it.

        Raises:
            ServerError: the command fails, or the server has no such interface.
        """
        if self._command is None:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
            self._server.post("/collective_rpc", body, _NO_INTERFACE)
            # What it has of prompts was computed by the weights before.
            self._server.post("/reset_prefix_cache", {}, _NO_INTERFACE)
            return
        told, log = os.environ | {"M2PO_MODEL": str(directory)}, self.directory / "reload.log"
        with open(log, "w") as output:  # a pipe would be held by a server that the command leaves in the background
            done = subprocess.run(
                self._command, shell=True, env=told, stdout=output, stderr=output, start_new_session=True
            )
        if done.returncode:
            text = said(log.read_text(errors="replace"))
            raise ServerError(f"--server.reload {self._command!r} failed with exit code {done.returncode}: {text}")


_NO_INTERFACE = "start vLLM with VLLM_SERVER_DEV_MODE=1, or give a command that restarts it: --server.reload"


def _changed(directory: Path) -> float:
    return directory.stat().st_mtime
