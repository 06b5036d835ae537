"""launch/local.sh: processes that know of each other, whose output can be told apart, and which end together."""

import os
import signal
import subprocess

import pytest

from tests.launch.scripts import AWKWARD, ended, program, run, runs, start, until, valid_bash


def test_each_process_knows_the_others(tmp_path):
    command = str(program(tmp_path, [0]))
    done = run("local.sh", "3", "--devices", "4", "train", *AWKWARD, M2PO_COMMAND=command, XLA_FLAGS="--some_flag=1")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] run 0", "[1] run 0", "[2] run 0"]
    seen = [runs(tmp_path, process) for process in range(3)]
    assert [len(each) for each in seen] == [1, 1, 1]
    assert [each[0]["arguments"] for each in seen] == [["train", *AWKWARD, "--distributed"]] * 3
    environments = [each[0]["environment"] for each in seen]
    assert [environment.pop("JAX_PROCESS_ID") for environment in environments] == ["0", "1", "2"]
    assert environments[0] == environments[1] == environments[2]
    assert environments[0]["JAX_NUM_PROCESSES"] == "3"
    assert environments[0]["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
    assert environments[0]["XLA_FLAGS"] == "--some_flag=1 --xla_force_host_platform_device_count=4"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_all(tmp_path, number, code):
    local = start("local.sh", "2", "train", M2PO_COMMAND=str(program(tmp_path, [None, 0])))
    until(lambda: runs(tmp_path, 0) and runs(tmp_path, 1))
    os.killpg(local.pid, number)
    assert ended(local)[0] == code
    assert [(tmp_path / f"checkpoint-{process}").read_text() for process in range(2)] == [f"[{number}]"] * 2
    pids = [runs(tmp_path, process)[0]["pid"] for process in range(2)]
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []


def test_the_exit_code_is_that_of_a_failed_process(tmp_path):
    done = run("local.sh", "2", "train", M2PO_COMMAND=str(program(tmp_path, [2])))
    assert done.returncode == 2


def test_dry_run_can_be_pasted(tmp_path):
    command = str(program(tmp_path, [0]))
    printed = run("local.sh", "2", "--dry-run", "train", *AWKWARD, M2PO_COMMAND=command)
    assert printed.returncode == 0
    assert valid_bash(printed.stdout)
    assert runs(tmp_path) == []
    assert subprocess.run(["bash", "-c", printed.stdout], timeout=60).returncode == 0
    assert [runs(tmp_path, i)[0]["arguments"] for i in range(2)] == [["train", *AWKWARD, "--distributed"]] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say how many processes first"),
        (["train"], "say how many processes first"),
        (["0", "train"], "say how many processes first"),
        (["2"], "say what to run"),
        (["2", "--devices", "x", "train"], "--devices is 'x'"),
        (["2", "--devices"], "--devices is ''"),
        (["2", "--mesh.data", "2"], "there is no flag --mesh.data here"),
    ],
)
def test_bad_input_is_one_line(arguments, said):
    done = run("local.sh", *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert done.stderr.startswith(f"local.sh: {said}")


def test_a_missing_environment_is_said(tmp_path):
    done = run("local.sh", "2", "train", M2PO_COMMAND=str(tmp_path / "absent"))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "make" in done.stderr
