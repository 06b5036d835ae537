"""What hosts say to each other, and one update that they make together, in processes of their own."""

import re

import jax
import numpy as np
import pytest

from m2po_jax.learner.hosts import Hosts
from tests.learner.test_mesh import policy
from tests.learner.test_packed import assert_same, expected
from tests.several_hosts import Job

WANTED = (
    "8x1x1:1", "1x8x1:4", "1x2x4:1", "8x1x1:2:packed", "2x2x2:4:packed", "8x1x1:2:packed:scattered",
)  # fmt: skip


def test_one_host_is_a_job_too():
    hosts = Hosts()
    assert hosts.first
    assert hosts.gather("anything", {"a": 1}) == [{"a": 1}]
    hosts.agree("configuration", {"a": 1})
    with pytest.raises(ZeroDivisionError), hosts.together():
        raise ZeroDivisionError


SPEAKER = """
import sys, time
from m2po_jax.config import UserError
from m2po_jax.learner.hosts import Hosts, LostHost, connect
connect()
import jax
hosts = Hosts(patience_s=float(sys.argv[2]))
me = hosts.index
try:
    with hosts.together():
        for i in range(12):
            heard = hosts.gather("numbers", {"host": me, "i": i})
            assert heard == [{"host": 0, "i": i}, {"host": 1, "i": i}], heard
        print("heard", flush=True)
        case = sys.argv[1]
        if case == "differ":
            hosts.agree("configuration", {"a": 1, "b": me})
        if case == "bad" and me == 1:
            raise UserError("a bad file")
        if case == "bug" and me == 0:
            raise ZeroDivisionError("division by zero")
        if case == "late" and me == 1:
            time.sleep(8)
        hosts.gather("the end")
        print("ended", flush=True)
    sys.exit()
except (UserError, LostHost, ZeroDivisionError) as met:
    error = met
    print(type(error).__name__, error, flush=True)
import os
time.sleep(2 if hosts.first else 0)  # JAX ends the others when the first has gone
if isinstance(error, UserError):
    sys.exit()
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "first", "second"),
    [
        ("well", "ended", "ended"),
        (
            "differ",
            r"_Told hosts 0 and 1 have another configuration: b \(0 and 1\)",
            "_Told hosts 0 and 1 have another",
        ),
        ("bad", "_Told host 1: a bad file", "UserError a bad file"),
        ("bug", "ZeroDivisionError division by zero", "LostHost host 0: ZeroDivisionError: division by zero"),
        ("late", "LostHost waiting for the end: DEADLINE_EXCEEDED", "LostHost|another task died"),
    ],
)
def test_hosts_hear_each_other_and_of_what_went_wrong(user_env, case, first, second):
    patience_s = 3 if case == "late" else 60
    with Job(user_env, [["-c", SPEAKER, case, patience_s]] * 2) as job:
        ended = job.ended(timeout_s=120)
    for (_, said), expected_line in zip(ended, (first, second), strict=True):
        assert said.splitlines()[1] == "heard", said
        assert re.search(expected_line, said), said


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("standard_promotion")
def test_two_hosts_of_four_devices_make_the_same_update_as_one(user_env, tmp_path):
    with Job(user_env, [["-m", "tests.learner.update_on_hosts", tmp_path, *WANTED]] * 2, devices=4) as job:
        for code, said in job.ended(timeout_s=800):
            assert code == 0, said
    structure = jax.tree.structure(policy()[1])
    for name in WANTED:
        found = np.load(tmp_path / f"{name.replace(':', '-')}.npz")
        leaves = [found[f"params/{index}"] for index in range(structure.num_leaves)]
        metrics = {key.removeprefix("metrics/"): found[key] for key in found.files if key.startswith("metrics/")}
        assert_same((metrics["loss"], jax.tree.unflatten(structure, leaves), metrics), expected("m2po"))
        assert found["shared"], "each host had rows of its own"
