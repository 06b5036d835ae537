"""The `m2po` command in processes of its own: help, exit codes, one line for bad input, resume."""

import gzip
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pandas as pd
import pytest

from m2po_jax.rollouts import read_segments, weights
from m2po_jax.rollouts.store import Store
from tests import tiny

pytestmark = pytest.mark.slow

ARM = "tests/tiny.py:tiny"


@pytest.fixture(scope="module")
def env(user_env: dict[str, str]) -> dict[str, str]:
    return tiny.subprocess_env(user_env)


@pytest.fixture(scope="module")
def done(env, standard_promotion, tmp_path_factory) -> Path:
    """A finished run, made by the command."""
    run = tmp_path_factory.mktemp("cli") / "done"
    finished = tiny.run(env, "-m", "m2po_jax", "train", ARM, "--run", run, "--base", tiny.base_run())
    assert finished.returncode == 0, finished.stderr
    assert f"finished {run} at version 16" in finished.stdout
    assert (run / "report.html").is_file()
    return run


def m2po(env, *arguments):
    return tiny.run(env, "-m", "m2po_jax", *arguments)


def test_help_of_everything_has_an_example(env):
    usage = m2po(env, "--help")
    assert usage.returncode == 0
    for command in ("train", "sweep", "report", "inspect", "export"):
        assert command in usage.stdout
        page = m2po(env, command, "--help")
        assert page.returncode == 0
        assert "Example: m2po" in page.stdout.replace("\n", " ")
    assert "--learner.learning-rate" in m2po(env, "train", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "did you mean train"),
        (["train"], "name a configuration"),
        (["train", "tests/tiny.py:tinny"], "did you mean tests/tiny.py:tiny"),
        (["train", "nowhere"], "nowhere"),
        (["train", ARM, "--learner.lerning-rate", "1"], "--learner.learning-rate"),
        (["train", ARM, "--learner.learning-rate", "fast"], "could not convert string to float"),
        (["train", ARM, "--staleness.k", "-1"], "staleness.k is -1"),
        (["train", ARM, "--staleness.k", "3"], "staleness.k 3 is not a multiple"),
        (["train", ARM, "--rollouts.prompts-per-batch", "5"], "does not divide"),
        (["train", ARM, "--objective.name", "gppo"], "did you mean"),
        (["train", ARM, "--objective.threshold", "-1"], "threshold"),
        (["train", ARM, "--evaluation.prompts", "5000"], "evaluation.prompts"),
        (["report", "nowhere"], "nowhere"),
        (["inspect", "nowhere"], "nowhere"),
        (["sweep", "nowhere.py"], "no experiment file"),
        (["export", "nowhere", "--out", "anywhere"], "nowhere"),
        (["train", ARM, "--model.source", "nowhere"], "nowhere/config.json is missing"),
        (["train", ARM, "--task.name", "questions"], "--task.questions FILE.jsonl"),
        (["train", ARM, "--task.template", "x"], "task.template 'x' has no {question} in it"),
        (["train", ARM, "--profile", "13:10"], "--profile 13:10 is empty"),
        (["train", ARM, "--profile", "10:99"], "--profile 10:99: the run has updates 0 to 15"),
        (["train", ARM, "--profile-dir", "x"], "say of which updates, as in --profile 10:13"),
    ],
)
def test_bad_input_is_said_and_ends_with_2(env, tmp_path, arguments, said):
    if arguments[0] == "train" and len(arguments) > 1:
        arguments = [*arguments, "--run", str(tmp_path / "run")]
    refused = m2po(env, *arguments)
    assert refused.returncode == 2, refused.stderr
    assert said in " ".join(re.sub(r"[│╭╮╰╯─]", " ", refused.stderr).split())
    assert "Traceback" not in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_profiled_run_says_where_its_trace_is_and_how_fast_it_was(env, done, tmp_path):
    run = tmp_path / "run"
    finished = m2po(env, "train", ARM, "--run", run, "--base", done, "--profile", "5:8")
    assert finished.returncode == 0, finished.stderr
    assert f"profile of updates 4 to 7 in {run / 'profile'}; open it with `xprof " in finished.stderr
    assert "tokens/s" in finished.stderr
    (trace,) = (run / "profile").rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = {event["args"]["step_num"] for event in events if event.get("name") == "update"}
    assert steps == {"4", "5", "6", "7"}
    assert {"data", "generate", "score", "publish"} <= {event.get("name") for event in events}
    assert tiny.lines(run) == tiny.lines(done), "neither the numbers of a run, nor which are told, depend on it"
    lines = [line for line in read_segments(Store.open(run)) if line["event"] == "update"]
    shares = ("data_wait_frac", "checkpoint_wait_frac", "host_frac")
    assert all(0.0 <= line[share] <= 1.0 for line in lines for share in shares)
    assert all(line["update_s"] > 0 and line["flops_per_s"] > line["tokens_per_s"] > 0 for line in lines)
    shards = pd.read_parquet(run / "rollouts" / "00000000")
    first = [line["sequence_tokens"] for line in lines if line["behavior_version"] == 0 and line["mini_batch"] < 2]
    tokens = shards.prompt_tokens.map(len) + shards.response_tokens.map(len)
    assert sum(first) == tokens.sum()
    assert "<h2>Speed</h2>" in (run / "report.html").read_text()


def test_a_run_with_another_configuration_is_refused_by_field(env, done):
    refused = m2po(env, "train", ARM, "--run", done, "--seed", "9")
    assert refused.returncode == 2
    assert "seed (0 there, 9 asked for)" in refused.stderr
    assert refused.stderr.strip().count("\n") == 0


def test_a_run_is_resumed_by_its_directory_and_its_configuration_runs_again(env, done, tmp_path):
    again = m2po(env, "train", done)
    assert again.returncode == 0
    assert "at version 16" in again.stdout
    copy = tmp_path / "copy"
    fresh = m2po(env, "train", done / "config.json", "--run", copy, "--base", done)
    assert fresh.returncode == 0, fresh.stderr
    digests = [weights.read_digest(Store.open(run), 16) for run in (done, copy)]
    assert digests[0] == digests[1]


def test_inspect_verifies_every_shard_and_names_the_bad_one(env, done, tmp_path):
    assert m2po(env, "inspect", done).returncode == 0
    damaged = tmp_path / "damaged"
    shutil.copytree(done, damaged)
    shard = sorted((damaged / "rollouts").glob("*/*.parquet"))[3]
    data = shard.read_bytes()
    shard.write_bytes(data[:300] + bytes(64) + data[364:])
    found = m2po(env, "inspect", damaged)
    assert found.returncode == 1
    assert shard.name in found.stdout


def test_shards_are_read_by_pandas_alone(done):
    rollouts = pd.read_parquet(done / "rollouts")
    assert rollouts.reward.isin([0.0, 1.0]).all()
    lengths = rollouts.response_tokens.map(len)
    assert (lengths == rollouts.behavior_logprobs.map(len)).all()
    assert rollouts.groupby("group_id").size().eq(4).all()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_run_that_resumes_to_the_same_bits(env, done, tmp_path, number):
    run = tmp_path / "stopped"
    process = tiny.start(env, "-m", "m2po_jax", "train", ARM, "--run", run, "--base", done)
    deadline = time.monotonic() + 120
    while not list(run.glob("batches/*.json")) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert "tiny: stopping after this batch" in said
    assert f"resume with: m2po train {run}" in said
    resumed = m2po(env, "train", run)
    assert resumed.returncode == 0, resumed.stderr
    assert weights.read_digest(Store.open(run), 16) == weights.read_digest(Store.open(done), 16)


def test_sweep_shares_a_base_policy_skips_what_is_done_and_reports(env, tmp_path):
    runs = tmp_path / "sweep"
    first = m2po(env, "sweep", "tests/tiny.py", "--runs", runs, "--seeds", "1", "2", "--only", "tiny")
    assert first.returncode == 0, first.stderr
    assert (runs / "report.html").is_file()
    second = m2po(env, "sweep", "tests/tiny.py", "--runs", runs, "--seeds", "1", "2")
    assert second.returncode == 0, second.stderr
    assert "2 of 4 runs are done already" in second.stdout
    assert "base policy taken from" in second.stderr
    for seed in (1, 2):
        base = {weights.read_digest(Store.open(runs / arm / f"seed-{seed}"), 0) for arm in ("tiny", "tiny-s0")}
        assert len(base) == 1
    table = second.stdout[second.stdout.index("Arms") :]
    assert "tiny-s0" in table
    third = m2po(env, "sweep", "tests/tiny.py", "--runs", runs, "--seeds", "1", "2")
    assert "4 of 4 runs are done already" in third.stdout


def test_a_base_that_is_no_run_is_refused_before_the_run_is_made(env, tmp_path):
    refused = m2po(env, "train", ARM, "--run", tmp_path / "run", "--base", tmp_path / "nothing")
    assert refused.returncode == 2
    assert "nothing" in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_sweep_refuses_the_same_run_twice(env, tmp_path):
    refused = m2po(env, "sweep", "tests/tiny.py", "--runs", tmp_path / "runs", "--seeds", "1", "1")
    assert refused.returncode == 2
    assert "no seed twice" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_a_signal_to_a_sweep_and_its_workers_loses_no_batch(env, done, tmp_path):
    """As `timeout` and job schedulers send it: to the whole process group."""
    experiment = tmp_path / "long.py"
    experiment.write_text(
        "from tests import tiny\n\n\n"
        "def configs():\n"
        "    return (tiny.with_learner(tiny.TINY, total_updates=4096, checkpoint_every=4096),)\n"
    )
    runs = tmp_path / "runs"
    process = tiny.start(env, "-m", "m2po_jax", "sweep", experiment, "--runs", runs, "--jobs", "1", group=True)
    run = runs / "tiny" / "seed-0"
    deadline = time.monotonic() + 200
    while len(list(run.glob("batches/*.json"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGTERM)
    out, said = process.communicate(timeout=200)
    assert process.returncode == 130, said
    assert "the same command resumes" in out
    newest = max(int(path.stem) for path in run.glob("batches/*.json"))
    checkpoints = [int(path.name) for path in (run / "checkpoints").iterdir()]
    assert max(checkpoints) == newest + tiny.TINY.learner.updates_per_batch


def test_help_shows_the_objectives_own_flags_with_their_choices(env):
    told = m2po(env, "train", ARM, "--objective.name", "grpo", "--objective.name", "dapo", "--help").stdout
    assert "--objective.no-overlong-filter" in told and "The ratio is clipped above" in told
    choices = ("token_mean", "sequence_mean", "constant_sum")
    assert all(choice in told for choice in choices) and "--objective.threshold" not in told


def test_the_last_objective_named_is_the_one_trained(env, done, tmp_path):
    run = tmp_path / "run"
    names = ("--objective.name", "dr_grpo", "--objective.name", "gspo", "--objective.kl-estimator", "k2")
    m2po(env, "train", ARM, "--run", run, "--base", done, "--learner.total-updates", "2", *names)
    saved = json.loads((run / "config.json").read_text())["config"]["objective"]
    assert saved["name"] == "gspo" and saved["normalize_advantages"] == "std"
    assert saved["hyperparameters"] == {
        "aggregation": "sequence_mean",
        "epsilon_high": 4e-4,
        "epsilon_low": 3e-4,
        "kl_coefficient": 0.0,
        "kl_estimator": "k2",
    }
