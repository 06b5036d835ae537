"""launch/queued_resource.sh: what it asks of gcloud, what it leaves alone, and what it says."""

import os
import shutil
import signal
import subprocess

import pytest

from tests.launch import cloud
from tests.launch.scripts import (
    AWKWARD,
    CONFIG,
    LAUNCH,
    ended,
    repository,
    run,
    single_quoted,
    start,
    until,
    valid_bash,
    write_config,
)

SCRIPT = "queued_resource.sh"


def queued(action, config, *flags, **environment):
    return run(SCRIPT, action, "--config", str(config), *flags, **environment)


def started_with(folder, request="run-1-learner"):
    """The arguments that launch/host.sh was started with on the hosts of a request."""
    return (folder / "homes" / request / "run-1" / "source" / "arguments").read_text().split("\0")[:-1]


@pytest.mark.parametrize("action", ["create", "status", "logs", "delete"])
def test_dry_run_needs_nothing_and_can_be_pasted(tmp_path, action):
    config = write_config(tmp_path, AWKWARD, REPOSITORY="https://example.com/it's mine.git", SSH_FLAGS="('--a b')")
    printed = queued(action, config, "--dry-run", PATH="/usr/bin:/bin")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert valid_bash(printed.stdout)
    assert "gcloud compute tpus queued-resources" in printed.stdout


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "--accelerator-type=v6e-16 --runtime-version=v2-alpha-tpuv6e --node-id=run-1-learner"),
        ({"LEARNER_TOPOLOGY": "v5e:4x8"}, "--accelerator-type=v5litepod-32"),
        ({"LEARNER_TOPOLOGY": "v5p:4x4x8"}, "--accelerator-type=v5p-256"),
        ({"LEARNER_TOPOLOGY": "v4:2x2x1"}, "--accelerator-type=v4-8"),
        ({"LEARNER_SLICES": "2"}, "--node-count=2 --node-prefix=run-1-learner"),
        ({"SPOT": "yes"}, "--node-id=run-1-learner --spot"),
    ],
)
def test_what_is_requested(tmp_path, changes, flags):
    printed = queued("create", write_config(tmp_path, **changes), "--dry-run").stdout.splitlines()
    assert printed[0].startswith("gcloud compute tpus queued-resources create run-1-learner ")
    assert flags in printed[0]
    assert printed[0].endswith("--project=some-project --zone=us-east5-b")


def test_create_waits_and_starts_the_run_once(tmp_path):
    there = cloud.with_queued_resources(tmp_path)
    config = write_config(tmp_path, AWKWARD, REPOSITORY=str(repository(tmp_path)), GRACE_S="77")
    made = queued("create", config, **there)
    assert made.returncode == 0, made.stderr
    assert cloud.requests(tmp_path) == {"run-1-learner": "ACTIVE"}
    assert started_with(tmp_path) == ["train", *AWKWARD, "--run", "gs://bucket/of us/runs/run-1", "--distributed"]
    for state in ("WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"):
        assert made.stderr.count(f"run-1-learner: {state}\n") <= 1
    assert "it costs money until: " in made.stderr
    unit = (tmp_path / "homes" / "run-1-learner" / "run-1.service").read_text()
    assert {"KillMode=mixed", "TimeoutStopSec=77", "WantedBy=multi-user.target"} <= set(unit.splitlines())

    again = queued("create", config, **there)
    assert again.returncode == 0
    assert "run-1-learner is there already: ACTIVE" in again.stderr
    assert "run-1 is running already" in again.stdout
    assert sum("'create'" in call for call in cloud.calls(tmp_path)) == 1
    services = (tmp_path / "homes" / "run-1-learner" / "services").read_text()
    assert services.count("systemctl restart") == 1


def test_a_slice_that_was_taken_away_is_requested_anew(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "ACTIVE")
    config = write_config(tmp_path, REPOSITORY=str(repository(tmp_path)), SPOT="yes")
    assert queued("create", config, **there).returncode == 0
    (tmp_path / "requests" / "run-1-learner").write_text("SUSPENDED")
    shutil.rmtree(tmp_path / "homes")
    again = queued("create", config, **there)
    assert again.returncode == 0
    assert "run-1-learner is SUSPENDED, so it has no hosts any more: requesting it anew" in again.stderr
    assert started_with(tmp_path)[0] == "train"


def test_generators_have_requests_of_their_own(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "ACTIVE")
    source = str(repository(tmp_path))
    generators = {"GENERATOR_TOPOLOGY": "v5e:2x2", "GENERATOR_ARGUMENTS": "(--wait '3 0')"}
    config = write_config(tmp_path, REPOSITORY=source, GENERATOR_SLICES="2", **generators)
    assert queued("create", config, **there).returncode == 0
    assert list(cloud.requests(tmp_path)) == ["run-1-generator-0", "run-1-generator-1", "run-1-learner"]
    assert started_with(tmp_path, "run-1-generator-1") == ["generate", "gs://bucket/of us/runs/run-1", "--wait", "3 0"]
    assert started_with(tmp_path)[0] == "learn", "as generators make what it reads"

    fewer = write_config(tmp_path, REPOSITORY=source, GENERATOR_SLICES="1", **generators)
    (tmp_path / "requests" / "run-1-x").write_text("ACTIVE")
    shown = queued("status", fewer, **there)
    assert shown.stderr.count("run-1-generator-1 is there as well") == 1
    assert "run-1-x" not in shown.stderr
    assert "log: --unit=run-1" in shown.stdout
    assert queued("delete", fewer, **there).returncode == 0
    assert list(cloud.requests(tmp_path)) == ["run-1-x"]


def test_delete_stops_the_run_first_and_may_be_repeated(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "ACTIVE")
    config = write_config(tmp_path, REPOSITORY=str(repository(tmp_path)))
    queued("create", config, **there)
    gone = queued("delete", config, **there)
    assert gone.returncode == 0
    assert gone.stderr.splitlines()[1:] == [
        "queued_resource.sh: run-1-learner is deleted",
        "queued_resource.sh: the run stays in gs://bucket/of us/runs/run-1",
    ]
    assert not (tmp_path / "homes" / "run-1-learner" / "active").exists()
    again = queued("delete", config, **there)
    assert (again.returncode, "run-1-learner is not there" in again.stderr) == (0, True)


def test_a_slice_that_stays_is_said(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "ACTIVE")
    config = write_config(tmp_path, REPOSITORY=str(repository(tmp_path)))
    queued("create", config, **there)
    (tmp_path / "stuck").touch()
    left = queued("delete", config, "--now", **there)
    assert left.returncode == 1
    assert "run-1-learner is still there (ACTIVE) and may cost money: repeat this command" in left.stderr
    assert (tmp_path / "homes" / "run-1-learner" / "active").exists(), "--now does not stop it first"


def test_a_request_that_fails_ends_the_waiting(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "PROVISIONING FAILED")
    failed = queued("create", write_config(tmp_path), **there)
    assert failed.returncode == 1
    assert "run-1-learner will not come up" in failed.stderr
    assert "what was requested stays, and may cost money" in failed.stderr.splitlines()[-1]


def test_hosts_that_cannot_start_are_said(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "ACTIVE")
    failed = queued("create", write_config(tmp_path, REPOSITORY=str(tmp_path / "absent")), **there)
    assert failed.returncode != 0
    assert "what was requested stays, and may cost money" in failed.stderr.splitlines()[-1]
    assert "runs on" not in failed.stderr


def test_a_gcloud_that_cannot_say_is_not_taken_for_no_slices(tmp_path):
    there = cloud.with_queued_resources(tmp_path)
    (tmp_path / "broken").touch()
    for action in ("create", "status", "delete"):
        assert queued(action, write_config(tmp_path), **there).returncode != 0
    assert [call for call in cloud.calls(tmp_path) if "'list'" not in call] == []


def test_ctrl_c_while_waiting_says_what_stays(tmp_path):
    there = cloud.with_queued_resources(tmp_path, "PROVISIONING")
    script = start(SCRIPT, "create", "--config", str(write_config(tmp_path)), **there)
    until(lambda: sum("'list'" in call for call in cloud.calls(tmp_path)) > 2)
    script.send_signal(signal.SIGINT)
    code, _, errors = ended(script)
    assert code == 130
    assert errors.splitlines()[-1].startswith("queued_resource.sh: ended early; what was requested stays")


REQUIRED = [name for name in CONFIG if not name.startswith("CLUSTER")]


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_value_is_named(tmp_path, name):
    config = write_config(tmp_path, **{name: None})
    refused = queued("create", config, "--dry-run", **{name: "of the environment"})
    assert (refused.returncode, len(refused.stderr.splitlines()), refused.stdout) == (2, 1, "")
    assert refused.stderr.startswith(f"queued_resource.sh: {name} is not set in {config}: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"NAME": "My_Run"}, "NAME 'My_Run'"),
        ({"BUCKET": "bucket"}, "BUCKET 'bucket'"),
        ({"BUCKET": "gs://bucket/"}, "BUCKET 'gs://bucket/'"),
        ({"SPOT": "true"}, "SPOT 'true'"),
        ({"LEARNER_TOPOLOGY": "v6e-16"}, "LEARNER_TOPOLOGY 'v6e-16'"),
        ({"LEARNER_SLICES": "0"}, "LEARNER_SLICES '0'"),
        ({"GENERATOR_SLICES": "x"}, "GENERATOR_SLICES 'x'"),
        ({"GENERATOR_SLICES": "1"}, "GENERATOR_TOPOLOGY is not set"),
        ({"ARGUMENTS": "some.py:config"}, "ARGUMENTS in"),
        ({"ARGUMENTS": "(a.py:b --run=mine)"}, "ARGUMENTS in"),
        ({"ARGUMENTS": "('it)"}, ""),
    ],
)
def test_a_bad_value_is_one_line(tmp_path, changes, said):
    refused = queued("create", write_config(tmp_path, **changes), "--dry-run")
    assert (refused.returncode, len(refused.stderr.splitlines()), refused.stdout) == (2, 1, "")
    assert said in refused.stderr
    assert str(tmp_path) in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what to do"),
        (["destroy"], "there is no action 'destroy'"),
        (["create", "delete"], "there is no action 'delete' here"),
        (["create", "--config"], "--config needs a file"),
        (["create", "--config", "absent.sh"], "there is no absent.sh"),
    ],
)
def test_a_bad_command_is_one_line(arguments, said):
    refused = run(SCRIPT, *arguments)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (2, 1)
    assert refused.stderr.startswith(f"queued_resource.sh: {said}")


def test_a_flag_of_another_action_is_refused(tmp_path):
    refused = queued("create", write_config(tmp_path), "--now", "--dry-run")
    assert refused.returncode == 2
    assert "there is no flag --now for create" in refused.stderr


def test_the_example_is_complete(tmp_path):
    """Filled in, it serves both scripts; as it stands, it names what is to be filled in."""
    example = (LAUNCH / "config.sh.example").read_text()
    config = tmp_path / "config.sh"
    config.write_text(example)
    for script, action in ((SCRIPT, "create"), ("gke.sh", "apply")):
        assert "PROJECT is not set" in run(script, action, "--config", str(config), "--dry-run").stderr
    config.write_text(example + "\n".join(f"{name}={single_quoted(value)}" for name, value in CONFIG.items()))
    for script, action in ((SCRIPT, "create"), ("gke.sh", "apply")):
        printed = run(script, action, "--config", str(config), "--dry-run")
        assert (printed.returncode, printed.stderr) == (0, "")
        assert "train experiments/plans.py:qwen3-8b " in printed.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcloud") is None, reason="gcloud is not installed")
@pytest.mark.parametrize("action", ["create", "status", "delete"])
def test_gcloud_itself_knows_every_flag(tmp_path, action):
    """It parses a command before it looks for an account, and here there is none to be found."""
    config = write_config(tmp_path, SPOT="yes", LEARNER_SLICES="2", SSH_FLAGS="(--tunnel-through-iap)")
    printed = queued(action, config, "--dry-run").stdout
    nobody = {"CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_CHECK_GCE_METADATA": "false", "HOME": str(tmp_path)}
    path = {"PATH": os.environ["PATH"]}
    tried = subprocess.run(["bash"], input=printed, text=True, capture_output=True, env=path | nobody, timeout=120)
    errors = [line for line in tried.stderr.splitlines() if line.startswith("ERROR")]
    assert len(errors) == printed.count("gcloud compute tpus queued-resources")
    assert [line for line in errors if "active account" not in line] == []
