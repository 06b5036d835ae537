"""launch/host.sh: what it does with each exit code, with signals, and how often it starts again."""

import os
import signal
import subprocess

import pytest

from tests.launch.scripts import AWKWARD, LAUNCH, ended, program, run, runs, start, until, valid_bash

SOON = {"M2PO_RESTART_WAIT_S": "0"}


@pytest.mark.parametrize(
    ("codes", "code", "count"),
    [([0], 0, 1), ([2], 2, 1), ([130], 130, 1), ([1, 0], 0, 2), ([143, 0], 0, 2), ([1, 137, 143, 2], 2, 4)],
)
def test_exit_codes(tmp_path, codes, code, count):
    done = run("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, codes)), **SOON)
    assert (done.returncode, len(runs(tmp_path))) == (code, count)
    assert len(done.stderr.splitlines()) == count - 1, "a line for each restart, and no others"


def test_a_program_that_is_not_there_is_not_started_again(tmp_path):
    done = run("host.sh", "train", M2PO_COMMAND=str(tmp_path / "absent"), **SOON)
    assert done.returncode == 127
    assert "restart" not in done.stderr


def test_restarts_are_limited(tmp_path):
    done = run("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [1])), M2PO_RESTARTS="2", **SOON)
    assert (done.returncode, len(runs(tmp_path))) == (1, 3)
    assert done.stderr.splitlines() == [
        "host.sh: m2po failed with exit code 1: restart 1 of at most 2 in 60 minutes, in 0 s",
        "host.sh: m2po failed with exit code 1: restart 2 of at most 2 in 60 minutes, in 0 s",
        "host.sh: m2po failed with exit code 1: not started again after 2 restarts in 60 minutes",
    ]


def test_giving_up_after_preemptions_is_a_failure(tmp_path):
    done = run("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [143])), M2PO_RESTARTS="0", **SOON)
    assert (done.returncode, len(runs(tmp_path))) == (1, 1)


def test_restarts_of_long_ago_do_not_count(tmp_path):
    command = str(program(tmp_path, [1, 1, 1, 0]))
    done = run("host.sh", "train", M2PO_COMMAND=command, M2PO_RESTARTS="1", M2PO_RESTART_MINUTES="0", **SOON)
    assert (done.returncode, len(runs(tmp_path))) == (0, 4)


def test_waits_grow(tmp_path):
    done = run("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [1, 1, 0])), M2PO_RESTART_WAIT_S="1")
    assert [line.rpartition(", ")[2] for line in done.stderr.splitlines()] == ["in 1 s", "in 2 s"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("whole_group", [False, True])
def test_signals_are_handed_on_once_and_waited_for(tmp_path, number, code, whole_group):
    host = start("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [None, 0])), **SOON)
    until(lambda: runs(tmp_path))
    os.killpg(host.pid, number) if whole_group else host.send_signal(number)
    assert ended(host)[0] == code
    assert (tmp_path / "checkpoint-0").read_text() == f"[{number}]"
    assert len(runs(tmp_path)) == 1


def test_another_host_was_told_to_stop(tmp_path):
    host = start("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [None, 0])), **SOON)
    until(lambda: runs(tmp_path))
    os.kill(runs(tmp_path)[0]["pid"], signal.SIGTERM)  # as m2po ends on all hosts, where one of them has the signal
    code, _, errors = ended(host)
    assert (code, len(runs(tmp_path))) == (0, 2)
    assert errors.startswith("host.sh: m2po was preempted: restart 1 ")


def test_sigterm_between_two_starts(tmp_path):
    host = start("host.sh", "train", M2PO_COMMAND=str(program(tmp_path, [1])), M2PO_RESTART_WAIT_S="100")
    until(lambda: runs(tmp_path))
    assert "restart 1" in host.stderr.readline()
    host.send_signal(signal.SIGTERM)
    assert ended(host, timeout_s=10)[0] == 143
    assert len(runs(tmp_path)) == 1


def test_arguments_arrive_as_they_are(tmp_path):
    command = str(program(tmp_path, [0]))
    assert run("host.sh", "train", *AWKWARD, M2PO_COMMAND=command).returncode == 0
    assert runs(tmp_path)[0]["arguments"] == ["train", *AWKWARD]
    printed = run("host.sh", "--dry-run", "train", *AWKWARD, M2PO_COMMAND=command)
    assert len(runs(tmp_path)) == 1
    assert subprocess.run(["bash", "-c", printed.stdout], timeout=60).returncode == 0
    assert runs(tmp_path)[1]["arguments"] == ["train", *AWKWARD]


def test_dry_run_says_what_is_installed():
    printed = run("host.sh", "--dry-run", "train", "some.py:config", M2PO_COMMAND="")
    assert printed.stdout.splitlines() == [
        f"make -C {LAUNCH.parent} host",
        f"{LAUNCH.parent}/.venv/bin/m2po train some.py:config ",
    ]
    assert valid_bash(printed.stdout)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ([], {}, "say what to run"),
        (["--run", "x"], {}, "there is no flag --run here"),
        (["train"], {"M2PO_RESTARTS": "many"}, "M2PO_RESTARTS is 'many'"),
        (["train"], {"M2PO_RESTART_WAIT_S": "-1"}, "M2PO_RESTART_WAIT_S is '-1'"),
    ],
)
def test_bad_input_is_one_line(arguments, environment, said):
    done = run("host.sh", *arguments, **environment)
    assert done.returncode == 2
    assert done.stderr.startswith(f"host.sh: {said}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("script", ["host.sh", "local.sh", "queued_resource.sh", "gke.sh"])
def test_help(script):
    shown = run(script, "--help")
    assert shown.returncode == 0
    assert shown.stdout.startswith(f"usage: launch/{script} ")
    assert max(map(len, shown.stdout.splitlines())) <= 120
