"""launch/local.sh on `m2po train --distributed` itself: two hosts, one of which is lost."""

import os
import re
import shlex
import signal
import sys

import pytest

from m2po_jax.rollouts import Store, weights
from tests import tiny
from tests.launch.scripts import ended, start, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("standard_promotion")]


def processes_of(run):
    """The m2po processes of a run, by host."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                arguments = file.read().split(b"\0")
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = dict(entry.partition(b"=")[::2] for entry in file.read().split(b"\0"))
        except OSError:
            continue
        if b"m2po_jax" in arguments and str(run).encode() in arguments:
            found[int(environment[b"JAX_PROCESS_ID"])] = int(pid)
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="there is no /proc")
def test_a_lost_host_starts_both_again_and_the_run_finishes(user_env, tmp_path):
    run, total = tmp_path / "run", 64
    program = tmp_path / "m2po"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m m2po_jax "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    flags = ["--base", str(tiny.base_run()), "--mesh.data", "2", "--learner.total-updates", str(total)]
    arguments = ["train", "tests/tiny.py:tiny", "--run", str(run), *flags]
    environment = tiny.subprocess_env(user_env) | {"M2PO_COMMAND": str(program), "M2PO_RESTART_WAIT_S": "1"}
    local = start("local.sh", "2", *arguments, **environment)
    try:
        until(lambda: any(path.name.isdigit() for path in run.glob("checkpoints/*")), timeout_s=400)
        os.kill(processes_of(run)[1], signal.SIGKILL)
        code, output, errors = ended(local, timeout_s=400)
    finally:
        if local.poll() is None:
            local.send_signal(signal.SIGTERM)
    assert code == 0, output + errors
    restarts = re.findall(r"^\[(\d)\] host.sh: m2po failed with exit code (\d+): restart", output, re.MULTILINE)
    assert ("1", "137") in restarts
    assert {host for host, _ in restarts} == {"0", "1"}
    assert re.search(r"^\[0\] .*resumed from checkpoint", output, re.MULTILINE)
    assert re.search(rf"^\[0\] finished .* at version {total};", output, re.MULTILINE)
    assert weights.latest(Store.open(run))[0] == total
