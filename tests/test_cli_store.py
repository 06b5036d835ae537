"""`m2po verify`, `prune`, `copy` and `fork` on a tiny run, on a disk and in a bucket."""

import json
import shutil
from pathlib import Path

import pytest

from m2po_jax import cli
from m2po_jax.rollouts import Store, open_run, read_batch_record, weights
from tests import tiny

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
TOTAL = tiny.TINY.learner.total_updates


@pytest.fixture(scope="module")
def trained(standard_promotion, tmp_path_factory) -> Path:
    """A finished run that keeps all checkpoints."""
    run = tmp_path_factory.mktemp("trained") / "run"
    tiny.train(tiny.with_learner(tiny.TINY, keep_checkpoints=9, diagnostics_every=1), run, tiny.base_run())
    return run


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def m2po(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(argument) for argument in arguments])
    return ended.value.code


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_verify_names_each_bad_object(run, capsys):
    assert m2po("verify", run) == 0
    assert "all is well" in capsys.readouterr().out
    shard = sorted(run.glob("rollouts/*/*.parquet"))[0]
    damage(shard)
    (run / "weights" / "LATEST").write_text("{")
    assert m2po("verify", run, "--move-aside") == 1
    said = capsys.readouterr().out
    name = shard.relative_to(run).as_posix()
    assert f"bad: {name}: " in said and "bad: weights/LATEST: " in said and "2 bad objects" in said
    assert f"moved {name} to {name}.bad-" in said and not shard.exists()
    (run / "batches" / "00000004.json").write_text("{")
    assert m2po("verify", run) == 1
    assert "bad: batches/00000004.json: " in capsys.readouterr().out


def test_verify_finds_weights_that_are_not_what_they_say(run, capsys):
    versions = weights.versions(Store.open(run))
    first, last = (run / "weights" / f"{version:08d}" for version in (versions[0], versions[-1]))
    shutil.copy(first / "_CHECKPOINT_METADATA", last / "_CHECKPOINT_METADATA")
    assert m2po("verify", run) == 1
    said = capsys.readouterr().out
    assert f"bad: weights/{last.name}: their content does not match their digest" in said


def test_prune_says_first_and_leaves_what_a_resumed_run_needs(run, capsys):
    for checkpoint in ("00000004", "00000012", "00000016"):
        shutil.rmtree(run / "checkpoints" / checkpoint)
    for version in range(8, TOTAL, 2):
        (run / "batches" / f"{version:08d}.json").unlink()
    before = sorted(path for path in run.rglob("*") if path.is_file())
    final = tiny.weights_digest(run, TOTAL)
    assert m2po("prune", run) == 0
    said = capsys.readouterr().out
    assert "would delete" in said and "objects of rollouts" in said and "nothing was deleted" in said
    assert sorted(path for path in run.rglob("*") if path.is_file()) == before
    assert m2po("prune", run, "--yes") == 0
    assert len([path for path in run.rglob("*") if path.is_file()]) < len(before)
    weights.retire(Store.open(run), TOTAL)
    watcher = tiny.train(open_run(run)[1].config, run, None)
    assert "resumed from checkpoint 8" in watcher.notes
    assert not [what for what in watcher.doings if what.startswith("generating")], "all that was needed had stayed"
    assert tiny.weights_digest(run, TOTAL) == final


def test_a_run_is_copied_to_a_bucket_and_back_and_nothing_is_overwritten(gcs, run, tmp_path, capsys):
    bucket = f"gs://{gcs.bucket}/{tmp_path.name}"
    gcs.faults(share=0.1, kinds=["429", "503", "drop", "truncate"], seed=1)
    assert m2po("copy", run, bucket) == 0
    first = capsys.readouterr().out
    assert m2po("copy", run, bucket) == 0
    assert "copied 0 objects" in capsys.readouterr().out
    assert "0 were there already" in first
    assert m2po("verify", bucket) == 0
    assert m2po("inspect", bucket) == 0
    gcs.faults(share=0.0)
    back = tmp_path / "back"
    assert m2po("copy", bucket, back) == 0
    for path in run.rglob("*"):
        if path.is_file() and path.name != ".learner.lock":
            assert (back / path.relative_to(run)).read_bytes() == path.read_bytes(), path
    assert m2po("verify", back) == 0
    capsys.readouterr()
    shard = sorted(back.glob("rollouts/*/*.parquet"))[0]
    damage(shard)
    assert m2po("copy", back, bucket) == 2
    assert f"{shard.name} is there with other content" in capsys.readouterr().err
    (back / "config.json").write_text((back / "config.json").read_text().replace("run_id", "run_id "))
    assert m2po("copy", run, back) == 2
    assert "holds another run" in capsys.readouterr().err


def test_half_a_copy_is_no_run_and_goes_on(run, tmp_path, capsys):
    target = tmp_path / "half"
    (target / "rollouts").mkdir(parents=True)
    name = sorted(run.glob("rollouts/*"))[0].name
    shutil.copytree(run / "rollouts" / name, target / "rollouts" / name)
    (target / "weights" / "00000000.orbax-checkpoint-tmp-copy" / "d").mkdir(parents=True)
    assert m2po("inspect", target) == 2
    capsys.readouterr()
    assert m2po("copy", run, target) == 0
    there = len(list((run / "rollouts" / name).iterdir()))
    assert there and f"{there} were there already" in capsys.readouterr().out
    assert m2po("verify", target) == 0


@pytest.mark.parametrize("where", ["disk", "bucket"])
def test_a_fork_with_the_same_configuration_ends_with_the_same_bits(gcs, run, tmp_path, where, capsys):
    new = str(tmp_path / "fork") if where == "disk" else f"gs://{gcs.bucket}/{tmp_path.name}-fork"
    assert m2po("fork", run, "--version", 8, "--run", new) == 0
    store, info = open_run(new)
    assert info.parents == (open_run(run)[1].run_id,) and info.run_id not in info.parents
    assert json.loads(store.get("config.json"))["forked_from"] == {"run": str(run), "version": 8}
    assert max(weights.versions(store)) == 8 == weights.latest(store)[0]
    assert read_batch_record(store, 8) is None
    watcher = tiny.train(info.config, new, None)
    assert "resumed from checkpoint 8" in watcher.notes
    assert not [note for note in watcher.notes if "bad shard" in note]
    assert tiny.weights_digest(new, TOTAL) == tiny.weights_digest(run, TOTAL)
    assert m2po("verify", new) == 0
    capsys.readouterr()
    assert m2po("fork", run, "--version", 8, "--run", new) == 2
    assert "is a run already" in capsys.readouterr().err


def test_a_fork_may_change_how_it_learns_and_not_what_its_data_is(run, tmp_path, capsys):
    new = tmp_path / "fork"
    assert m2po("fork", run, "--version", 8, "--run", new, "--sampling.temperature", "0.5") == 2
    assert "a fork cannot change" in capsys.readouterr().err
    assert m2po("fork", run, "--version", 7, "--run", new) == 2
    assert "no whole checkpoint 7" in capsys.readouterr().err
    changes = ("--learner.learning-rate", "1e-3", "--objective.name", "grpo", "--name", "other")
    assert m2po("fork", run, "--version", 8, "--run", new, *changes) == 0
    config = open_run(new)[1].config
    assert (config.learner.learning_rate, config.objective.name, config.name) == (1e-3, "grpo", "other")
    tiny.train(config, new, None)
    assert tiny.weights_digest(new, TOTAL) != tiny.weights_digest(run, TOTAL)
