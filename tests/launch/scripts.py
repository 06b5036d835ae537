"""The launch scripts as processes, and small programs in the place of m2po that end as they are told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LAUNCH = Path(__file__).parents[2] / "launch"

PROGRAM = '''#!{python}
"""Records arguments and environment, and ends with the next of the given codes; a code of None waits for a signal."""
import json, os, pathlib, signal, sys, time

folder = pathlib.Path({folder!r})
process = os.environ.get("JAX_PROCESS_ID", "0")
seen = folder / f"seen-{{process}}.jsonl"
count = len(seen.read_text().splitlines()) if seen.exists() else 0
signals = []


def handle(number, frame):
    signals.append(number)


signal.signal(signal.SIGTERM, handle)
if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
    signal.signal(signal.SIGINT, handle)
environment = {{name: value for name, value in os.environ.items() if name.startswith(("JAX_", "XLA_"))}}
with seen.open("a") as file:
    file.write(json.dumps({{"arguments": sys.argv[1:], "environment": environment, "pid": os.getpid()}}) + "\\n")
print(f"run {{count}}", flush=True)
codes = {codes!r}
code = codes[min(count, len(codes) - 1)]
if code is None:
    while not signals:
        time.sleep(0.01)
    time.sleep(0.3)  # a checkpoint takes time
    (folder / f"checkpoint-{{process}}").write_text(json.dumps(signals))
    code = {{signal.SIGTERM: 143, signal.SIGINT: 130}}[signals[0]]
sys.exit(code)
'''


def program(folder: Path, codes: Sequence[int | None]) -> Path:
    """A program that ends with these codes, one after another; None: when it is told to by a signal."""
    path = folder / "m2po"
    path.write_text(PROGRAM.format(python=sys.executable, folder=str(folder), codes=list(codes)), encoding="utf-8")
    path.chmod(0o755)
    return path


def runs(folder: Path, process: int = 0) -> list[dict]:
    """What each run of the program has seen."""
    path = folder / f"seen-{process}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """A script in a process group of its own, as of a terminal."""
    return subprocess.Popen(
        [str(LAUNCH / script), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A script to its end."""
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def ended(process: subprocess.Popen[str], timeout_s: float = 60) -> tuple[int, str, str]:
    """Exit code, output and errors of a script that is about to end; it is killed, and all that it started, if not."""
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output, errors


def until(condition: Callable[[], object], timeout_s: float = 30) -> None:
    """Wait for a condition."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def valid_bash(text: str) -> bool:
    """Whether a text can be pasted into bash."""
    return subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0


CONFIG = {
    "PROJECT": "some-project",
    "ZONE": "us-east5-b",
    "BUCKET": "gs://bucket/of us",
    "NAME": "run-1",
    "REPOSITORY": "https://example.com/m2po_jax.git",
    "REVISION": "v1.0",
    "LEARNER_TOPOLOGY": "v6e:4x4",
    "RUNTIME_VERSION": "v2-alpha-tpuv6e",
    "CLUSTER": "some-cluster",
    "CLUSTER_LOCATION": "us-east5",
}
AWKWARD = ["a b.py:config", "--task.template", 'It\'s "this": $HOME `id` \\ \n{question}', "--x=$(id)", "--empty", ""]


def write_config(folder: Path, arguments: Sequence[str] = ("some.py:config",), **changes: str | None) -> Path:
    """A configuration file; None leaves a value out, and values with a leading `(` are written as they are."""
    path = folder / "config of mine.sh"
    values = {**CONFIG, "ARGUMENTS": f"({' '.join(map(single_quoted, arguments))})", **changes}
    lines = [
        f"{name}={value if value.startswith('(') else single_quoted(value)}" for name, value in values.items() if value
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def single_quoted(text: str) -> str:
    """One word of bash."""
    return "'" + text.replace("'", "'\\''") + "'"


def repository(folder: Path) -> Path:
    """A git repository, tagged v1.0, whose launch/host.sh writes its arguments to arguments.json, NUL after each."""
    path = folder / "some repository"
    (path / "launch").mkdir(parents=True)
    host = path / "launch" / "host.sh"
    host.write_text("#!/usr/bin/env bash\nprintf '%s\\0' \"$@\" >arguments\n", encoding="utf-8")
    host.chmod(0o755)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com", "-C", str(path)]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--message=a"], ["tag", "v1.0"]):
        subprocess.run([*git, *command], check=True)
    return path
