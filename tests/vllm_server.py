"""vLLM on the CPU as a process of its own, from the environment that `make test-extra` makes for it.

As a command, `python -m tests.vllm_server LOG PORT`, it restarts such a server with the model at $M2PO_MODEL.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.several_hosts import free_port

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "vllm"
STARTS_S = 500.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Vllm:
    """One server at a port of its own, which may be killed and started again."""

    def __init__(self, log: Path, port: int | None = None):
        """Its output goes to `log`, its process id into a file beside it."""
        if not VLLM.exists():
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"{VLLM} is missing: make test-extra makes it")
        self.port, self._log, self._pid = port or free_port(), log, log.with_suffix(".pid")
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None

    @property
    def restart(self) -> str:
        """A shell command that starts it anew with the model at $M2PO_MODEL."""
        return f"cd {ROOT} && {sys.executable} -m tests.vllm_server {self._log} {self.port}"

    def start(self, model: str | Path, *options: str) -> None:
        """Start with a model's directory, in float32, and return at once."""
        options = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "32", *options)
        command = [str(VLLM), "serve", str(model), "--host", "127.0.0.1", "--port", str(self.port), *options]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHON"))}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                command, env=kept | ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self._pid.write_text(str(self._process.pid))

    def wait(self) -> None:
        """Until it answers."""
        until = time.monotonic() + STARTS_S
        while time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise AssertionError(f"vLLM did not start; it said:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        if self._pid.exists():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(int(self._pid.read_text()), signal.SIGKILL)
            self._pid.unlink()
        if self._process is not None:  # another one, if it was restarted by the command since
            self._process.wait()


if __name__ == "__main__":
    again = Vllm(Path(sys.argv[1]), int(sys.argv[2]))
    again.kill()
    again.start(os.environ["M2PO_MODEL"])
