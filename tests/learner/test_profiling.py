"""Which updates are traced, what the trace holds, and what is said of ranges that cannot be."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from m2po_jax.config import UserError
from m2po_jax.learner import speed
from m2po_jax.learner.profiling import Profile, chosen
from tests import tiny


def traced(directory):
    """Names of what happened on the host, with the numbers of the steps."""
    (path,) = directory.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [(event["name"], event.get("args", {}).get("step_num")) for event in events if "name" in event]


def run(profile, batches, directory):
    """A loop of batches with a matrix product for each update; what the trace then holds."""
    profile.prepare()
    clock = speed.Speed(tiny.TINY.model, jax.devices()[:1])
    state = jnp.ones((8, 8))
    for batch in batches:
        profile.before(batch, state)
        with clock.doing(speed.DATA):
            pass
        for version in batch:
            with clock.updating(version) as metrics:
                state = state @ state
                metrics.append(state)
    jax.block_until_ready(state)
    profile.close()
    clock.close()
    return traced(directory)


def test_the_batches_of_the_chosen_updates_are_traced(tmp_path):
    said = []
    profile = Profile(range(5, 7), tmp_path / "a" / "b", said.append)
    events = run(profile, [range(start, start + 2) for start in range(0, 12, 2)], tmp_path)
    steps = {int(step) for name, step in events if name == speed.UPDATE}
    assert steps == {4, 5, 6, 7}
    assert sum(name == speed.DATA for name, _ in events) == 2
    assert len(said) == 1
    assert said[0].startswith(f"profile of updates 4 to 7 in {tmp_path / 'a' / 'b'}; open it with `xprof --logdir ")
    (path,) = tmp_path.rglob("*.trace.json.gz")
    assert f", or {path.relative_to(tmp_path / 'a' / 'b')} at " in said[0]


def test_a_run_that_stops_first_ends_the_trace(tmp_path):
    said = []
    profile = Profile(range(2, 100), tmp_path, said.append)
    events = run(profile, [range(0, 1), range(1, 2), range(2, 3), range(3, 4)], tmp_path)
    assert {int(step) for name, step in events if name == speed.UPDATE} == {2, 3}
    assert said[0].startswith("profile of updates 2 to 3 in ")


def test_a_run_that_goes_on_later_says_that_nothing_was_profiled(tmp_path):
    said = []
    profile = Profile(range(2, 3), tmp_path, said.append)
    for batch in (range(4, 6), range(6, 8)):
        profile.before(batch, None)
    profile.close()
    assert said == ["nothing was profiled: this run goes on after update 3"]


def test_a_range_leaves_its_end_out():
    assert list(chosen("10:13", 13)) == [10, 11, 12]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10", "is no range of updates"),
        ("10-13", "is no range of updates"),
        ("-1:3", "is no range of updates"),
        ("13:10", "is empty"),
        ("3:3", "is empty"),
        ("10:14", "the run has updates 0 to 12"),
    ],
)
def test_a_bad_range_is_one_line(text, said):
    with pytest.raises(UserError, match=said) as refusal:
        chosen(text, 13)
    assert "\n" not in str(refusal.value)


def test_a_directory_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"the profile's directory .*file.* cannot be made: "):
        Profile(range(1), tmp_path / "file" / "below", print).prepare()
