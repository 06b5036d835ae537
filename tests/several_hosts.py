"""Jobs of several hosts, on this one: a process each, with virtual CPU devices of its own."""

import socket
import subprocess
import sys
from typing import Any

from tests import tiny


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environments(env: dict[str, str], hosts: int, devices: int) -> list[dict[str, str]]:
    """The environment of each host of a job that nobody has started yet."""
    address = f"127.0.0.1:{free_port()}"
    return [
        {
            **tiny.subprocess_env(env),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": str(hosts),
            "JAX_PROCESS_ID": str(index),
        }
        for index in range(hosts)
    ]


class Job:
    """Processes that were started together; as a context manager, none is left behind."""

    def __init__(self, env: dict[str, str], commands: list[list[Any]], devices: int = 1):
        """A host for each of the Python `commands`, with as many `devices`."""
        self.hosts = [
            subprocess.Popen(
                [sys.executable, *map(str, command)],
                cwd=tiny.ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for command, environment in zip(commands, environments(env, len(commands), devices), strict=True)
        ]

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        for host in self.hosts:
            host.kill()
            host.wait()

    def ended(self, timeout_s: float = 300.0) -> list[tuple[int, str]]:
        """Exit code and output of each host, without what Gloo says of its connections."""
        said = [host.communicate(timeout=timeout_s)[0] for host in self.hosts]
        texts = ["\n".join(line for line in text.splitlines() if "[Gloo]" not in line) for text in said]
        return [(host.returncode, text) for host, text in zip(self.hosts, texts, strict=True)]
