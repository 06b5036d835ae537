import os
from dataclasses import replace

import pytest

from m2po_jax.config import Config, ConfigError, StalenessConfig, UserError
from m2po_jax.rollouts import Store, create_or_resume, open_run, sole_learner


def test_a_run_is_made_once_and_resumed_with_the_same_configuration(store):
    config = Config(name="arm", seed=3)
    made = create_or_resume(store, config)
    assert made.config == config
    assert len(made.run_id) == 32
    text = store.get("config.json")
    assert create_or_resume(store, config) == made
    assert store.get("config.json") == text
    opened, info = open_run(store.local_path)
    assert info == made
    assert opened.local_path == store.local_path


def test_another_configuration_is_refused_naming_field_values_and_fix(store):
    config = Config()
    create_or_resume(store, config)
    other = replace(config, seed=1, staleness=StalenessConfig(k=8))
    with pytest.raises(ConfigError) as refused:
        create_or_resume(store, other)
    for part in (str(store.local_path), "seed (0 there, 1 asked for)", "staleness.k (0 there, 8 asked for)", "--run"):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)
    assert open_run(store.local_path)[1].config == config


def test_two_runs_have_two_ids(store, tmp_path):
    other = create_or_resume(Store.open(tmp_path / "other", create=True), Config())
    assert other.run_id != create_or_resume(store, Config()).run_id


def test_what_is_no_run_is_named(store, tmp_path):
    with pytest.raises(UserError, match=r"run is not a run: it has no config\.json"):
        open_run(store.local_path)
    with pytest.raises(UserError, match="nowhere is not a directory"):
        open_run(tmp_path / "nowhere")
    store.replace("config.json", b"{")
    with pytest.raises(UserError, match=r"config\.json"):
        open_run(os.fspath(store.local_path))


def test_two_makers_at_once_agree_on_one_run(store, start):
    script = """
import sys
from m2po_jax.config import Config
from m2po_jax.rollouts import Store, create_or_resume
store = Store.open(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
print(create_or_resume(store, Config()).run_id)
"""
    makers = [start(script, store.local_path) for _ in range(3)]
    for maker in makers:
        assert maker.stdout.readline() == "ready\n"
    for maker in makers:
        maker.stdin.write("go\n")
        maker.stdin.flush()
    ids = {maker.communicate(timeout=30)[0].strip() for maker in makers}
    assert ids == {open_run(store.local_path)[1].run_id}


def test_a_second_learner_of_a_run_is_refused_until_the_first_ends(tmp_path):
    store = Store.open(tmp_path, create=True)
    with sole_learner(store), pytest.raises(UserError, match="another process is training"), sole_learner(store):
        pass
    with sole_learner(store):
        pass
