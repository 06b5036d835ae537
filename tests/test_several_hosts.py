"""`m2po train --distributed` in two processes: signals, kills, resumes, and errors that all hosts hear of."""

import os
import re
import shutil
import signal
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from m2po_jax.config import MeshConfig
from m2po_jax.learner.checkpoints import Checkpoints
from m2po_jax.learner.state import init_state, make_optimizer
from m2po_jax.models import Transformer
from m2po_jax.rollouts import Store, open_run, weights
from m2po_jax.tasks import ArithmeticTask
from tests import tiny
from tests.several_hosts import Job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("standard_promotion")]
ARM = "tests/tiny.py:tiny"
TOTAL = tiny.TINY.learner.total_updates


def command(run, base, *flags):
    """Two hosts of a device each."""
    return ["-m", "m2po_jax", "train", ARM, "--distributed", "--run", run, "--base", base, "--mesh.data", 2, *flags]


def train(env, run, base, *flags):
    with Job(env, [command(run, base, *flags)] * 2) as job:
        return job.ended()


def wait_for(run, pattern, count):
    deadline = time.monotonic() + 240
    while len(list(run.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"{run} has no {count} {pattern}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def base(standard_promotion):
    return tiny.base_run()


@pytest.fixture(scope="module")
def whole(user_env, base, tmp_path_factory):
    """A finished run of two hosts."""
    run = tmp_path_factory.mktemp("runs") / "whole"
    for code, said in train(user_env, run, base):
        assert code == 0, said
    return run


def test_two_hosts_write_one_run(whole):
    store = Store.open(whole)
    assert weights.latest(store) == (TOTAL, weights.read_digest(store, TOTAL))
    assert [line["version"] for line in tiny.lines(whole) if line["event"] == "update"] == list(range(TOTAL))
    assert len(store.list("batches")) == TOTAL // 2 + 1, "records, and where the learner is"
    assert len(store.list("rollouts")) == TOTAL, "two shards a batch, none of them twice"
    assert (whole / "report.html").exists()
    assert open_run(whole)[1].config.mesh.data == 2


@pytest.mark.parametrize("host", [0, 1])
def test_sigterm_to_one_host_stops_all_with_a_checkpoint(user_env, base, whole, tmp_path, host):
    run = tmp_path / "run"
    with Job(user_env, [command(run, base)] * 2) as job:
        wait_for(run, "batches/*.json", 1)
        job.hosts[host].send_signal(signal.SIGTERM)
        ended = job.ended()
    assert [code for code, _ in ended] == [143, 143], ended
    assert "stopped at version" in ended[0][1]
    assert "stopping after this batch" in ended[host][1]
    shutil.copytree(run, tmp_path / "copy")
    for code, said in train(user_env, run, base):
        assert code == 0, said
        assert host or "resumed from checkpoint" in said
    assert weights.read_digest(Store.open(run), TOTAL) == weights.read_digest(Store.open(whole), TOTAL)
    assert tiny.lines(run) == tiny.lines(whole)
    if host == 0:
        assert_one_host_goes_on(tmp_path / "copy", whole)


def assert_one_host_goes_on(run, whole):
    """What two hosts have written, one restores bit for bit on one device, and ends but for rounding where they did."""
    store, config = Store.open(run), replace(tiny.TINY, mesh=MeshConfig(data=1))
    model = Transformer(config.model, ArithmeticTask(config.task).tokenizer.vocab_size)
    checkpoints = Checkpoints(store, 2)
    version = checkpoints.latest()
    like = init_state(model.init_params(jax.random.key(0)), make_optimizer(config.learner))
    restored, _ = checkpoints.restore(version, like)
    checkpoints.close()
    published, _ = weights.load(store, version, restored.params)
    jax.tree.map(np.testing.assert_array_equal, restored.params, published)
    watcher = tiny.train(config, run, None)
    assert f"resumed from checkpoint {version}" in watcher.notes
    ends = [weights.load(Store.open(where), TOTAL, restored.params)[0] for where in (run, whole)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), *ends)


def test_ctrl_c_on_one_host_is_nobodys_reason_to_start_again(user_env, base, tmp_path):
    run = tmp_path / "run"
    with Job(user_env, [command(run, base)] * 2) as job:
        wait_for(run, "batches/*.json", 1)
        job.hosts[1].send_signal(signal.SIGINT)
        ended = job.ended()
    assert [code for code, _ in ended] == [130, 130], ended


@pytest.mark.extra
@pytest.mark.parametrize("host", [0, 1])
def test_the_other_host_ends_soon_after_a_kill_and_the_run_resumes_to_the_same_bits(
    user_env, base, whole, tmp_path, host
):
    run = tmp_path / "run"
    with Job(user_env, [command(run, base)] * 2) as job:
        wait_for(run, "checkpoints/0*", 1)
        job.hosts[host].kill()
        killed = time.monotonic()
        code, said = job.ended(timeout_s=120)[1 - host]
        assert time.monotonic() - killed < 60, "within a minute"
    assert code not in (0, 2, 143), said
    assert re.search("another host was lost|another task died", said)
    for code, said in train(user_env, run, base):
        assert code == 0, said
    assert weights.read_digest(Store.open(run), TOTAL) == weights.read_digest(Store.open(whole), TOTAL)


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--learner.learning-rate", "1e-3"], r"learner.learning_rate \(0.003 and 0.001\)"),
        (["--learner.learning-rate", "fast"], "its command line was refused"),
        (["--mesh.data", 3], "mesh.data"),
        (["--model.width", 18], "model.width"),
    ],
)
def test_a_host_with_another_command_stops_all_with_a_line(user_env, base, tmp_path, flags, line):
    run = tmp_path / "run"
    with Job(user_env, [command(run, base), command(run, base, *flags)]) as job:
        ended = job.ended(timeout_s=120)
    assert [code for code, _ in ended] == [2, 2], ended
    assert re.search(line, ended[0][1]), ended
    assert len(ended[0][1].split("\n\n")) <= 2 and ended[0][1].count("m2po:") == 2, "who joins, and what is wrong"
    assert not os.path.exists(run), "nothing was begun"


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"JAX_NUM_PROCESSES": ""}, "JAX_NUM_PROCESSES is not set"),
        ({"JAX_PROCESS_ID": "2"}, "JAX_PROCESS_ID is 2: with JAX_NUM_PROCESSES 2 use 0 to 1"),
        ({"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES is 'two': use a whole number"),
    ],
)
def test_variables_that_describe_no_job_are_named(user_env, base, tmp_path, variables, line):
    env = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:9", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", **variables}
    env = {name: value for name, value in env.items() if value}
    ended = tiny.run(tiny.subprocess_env(user_env) | env, *command(tmp_path / "run", base))
    assert ended.returncode == 2
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
