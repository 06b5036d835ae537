"""Work units: a pure function of the run's numbers and the stored weights, whoever makes them and in whatever order."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from m2po_jax.config import Config, LearnerConfig, RolloutConfig, SamplingConfig, TaskConfig, UserError
from m2po_jax.generation import Generator
from m2po_jax.generation.engine import generate
from m2po_jax.models import response_logprobs
from m2po_jax.rollouts import Store, UnitId, concatenate, read_shard, shard_path, weights
from m2po_jax.tasks import ArithmeticTask, left_padded
from tests.models import policies

CONFIG = Config(
    task=TaskConfig(min_operands=2, max_operands=3),
    model=policies.TINY,
    sampling=SamplingConfig(temperature=0.8, max_new_tokens=6),
    rollouts=RolloutConfig(prompts_per_batch=6, group_size=3, units_per_batch=2),
    learner=LearnerConfig(updates_per_batch=2),
)
TASK = ArithmeticTask(CONFIG.task)
MODEL, BASE = policies.random_policy(TASK.tokenizer.vocab_size)
_, LATER = policies.random_policy(TASK.tokenizer.vocab_size, seed=1)
UNITS = [UnitId(version, batch, unit) for version in (0, 4) for batch in (0, 1) for unit in (0, 1)]


@pytest.fixture
def make_run(tmp_path):
    """A store of its own with the weights of versions 0 and 4, and a generator on it."""

    def make(name, run_id="run", config=CONFIG, later=LATER):
        store = Store.open(tmp_path / name, create=True)
        weights.publish(store, 0, BASE)
        weights.publish(store, 4, later)
        return store, Generator(store, run_id, config, TASK, MODEL)

    return make


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run whose units were all made in order: its store, its generator and the shards."""
    store = Store.open(tmp_path_factory.mktemp("made"))
    weights.publish(store, 0, BASE)
    weights.publish(store, 4, LATER)
    generator = Generator(store, "run", CONFIG, TASK, MODEL)
    for version in (0, 4):
        wanted = [unit for unit in UNITS if unit.version == version]
        assert generator.missing(wanted) == wanted
        generator.make(wanted)
    return store, generator, {unit: read_shard(store, unit) for unit in UNITS}


def assert_scored_by(params, rollouts):
    """The recorded log-probs are those of the stored token ids under `params`."""
    rows = zip(rollouts.prompt_tokens, rollouts.prompt_lengths, strict=True)
    prompts, valid = left_padded([ids[:length].tolist() for ids, length in rows], TASK.max_prompt_tokens, 0)
    rollouts = rollouts.padded(TASK.max_prompt_tokens, CONFIG.sampling.max_new_tokens)
    mask = np.arange(CONFIG.sampling.max_new_tokens) < rollouts.response_lengths[:, None]
    scored = jax.jit(response_logprobs, static_argnums=0)(
        MODEL, params, prompts, valid, rollouts.response_tokens, mask, np.float32(CONFIG.sampling.temperature)
    )
    np.testing.assert_allclose(rollouts.behavior_logprobs, scored[0], atol=1e-5)


def test_units_are_the_same_whoever_makes_them_in_whatever_order(made, make_run):
    """Also REGRESSIONS 18: this generator goes 4, 0, 4, 0, and nothing of the weights before stays with it."""
    store, generator = make_run("other")
    for unit in (UnitId(4, 1, 1), UnitId(0, 1, 0), UnitId(4, 0, 0), UnitId(0, 0, 1)):
        generator.make([unit])
        assert read_shard(store, unit).digest == made[2][unit].digest


def test_another_run_id_changes_the_shard_and_none_of_its_rows(made, make_run, equal_rollouts):
    store, generator = make_run("other", run_id="another")
    generator.make([UnitId(0, 0, 1)])
    shard, reference = read_shard(store, UnitId(0, 0, 1)), made[2][UnitId(0, 0, 1)]
    assert (shard.provenance.run_id, reference.provenance.run_id) == ("another", "run")
    assert shard.digest != reference.digest
    equal_rollouts(shard.rollouts, reference.rollouts)


def test_another_seed_draws_other_prompts(made, make_run):
    store, generator = make_run("other", config=replace(CONFIG, seed=1))
    generator.make([UnitId(0, 0, 0)])
    other, usual = read_shard(store, UnitId(0, 0, 0)).rollouts, made[2][UnitId(0, 0, 0)].rollouts
    assert other.prompt_ids != usual.prompt_ids


def test_only_missing_units_are_made(made, make_run):
    store, generator = make_run("other")
    units = [UnitId(0, 0, 0), UnitId(0, 0, 1), UnitId(0, 1, 0)]
    generator.make(units[1:2])
    first = store.get(shard_path(units[1]))
    assert generator.missing(units) == [units[0], units[2]]
    generator.make(generator.missing(units))
    assert generator.missing(units) == []
    generator.make([])
    assert store.get(shard_path(units[1])) == first
    assert [read_shard(store, unit).digest for unit in units] == [made[2][unit].digest for unit in units]


def test_weights_come_from_the_store(made):
    store, generator, shards = made
    for unit, shard in shards.items():
        assert shard.provenance == generator.provenance(weights.read_digest(store, unit.version))
        assert_scored_by(BASE if unit.version == 0 else LATER, shard.rollouts)
    with pytest.raises(AssertionError):
        assert_scored_by(BASE, shards[UnitId(4, 0, 0)].rollouts)


def test_a_version_whose_weights_were_replaced_is_loaded_anew(made, make_run):
    """REGRESSIONS 18, for a version number that changes its meaning under a running generator."""
    store, generator = make_run("other", later=BASE)
    generator.make([UnitId(4, 0, 0)])
    assert_scored_by(BASE, read_shard(store, UnitId(4, 0, 0)).rollouts)
    weights.retire(store, 4)
    weights.publish(store, 4, LATER)
    generator.make([UnitId(4, 0, 1)])
    assert read_shard(store, UnitId(4, 0, 1)).digest == made[2][UnitId(4, 0, 1)].digest


def test_a_version_without_weights_is_named(make_run):
    store, generator = make_run("other")
    with pytest.raises(UserError, match="version 8"):
        generator.make([UnitId(8, 0, 0)])
    assert store.list("rollouts") == []


def test_token_ids_out_are_the_ids_that_were_sampled(made):
    """REGRESSIONS 13: a response that text cannot express, an end or a padding id within, is stored as sampled."""
    rollouts = concatenate([shard.rollouts for shard in made[2].values()])
    tokenizer, unspeakable = TASK.tokenizer, 0
    for row in range(rollouts.rows):
        tokens = rollouts.response_tokens[row, : rollouts.response_lengths[row]].tolist()
        ended = rollouts.finish_reasons[row] == "stop"
        assert ended == (tokens[-1] == tokenizer.eos_id)
        assert ended or len(tokens) == CONFIG.sampling.max_new_tokens
        assert (rollouts.behavior_logprobs[row, : len(tokens)] < 0.0).all()
        assert rollouts.response_texts[row] == tokenizer.decode(tokens)
        assert rollouts.rewards[row] == TASK.grade(rollouts.response_texts[row], rollouts.gold_answers[row]).score
        unspeakable += tokenizer.pad_id in tokens
    assert unspeakable > 0, "no padding id was sampled: choose another seed"
    assert set(rollouts.finish_reasons) == {"stop", "length"}


def test_a_group_is_one_prompt_and_its_id_is_never_used_again(made):
    groups, shape = [], CONFIG.rollouts
    for shard in made[2].values():
        rollouts = shard.rollouts
        assert rollouts.sample_indices.tolist() == list(range(shape.group_size)) * shape.prompts_per_unit
        for start in range(0, rollouts.rows, shape.group_size):
            rows = slice(start, start + shape.group_size)
            assert len(set(rollouts.group_ids[rows])) == len(set(rollouts.prompt_ids[rows])) == 1
            assert len(set(rollouts.gold_answers[rows])) == 1
            groups.append(int(rollouts.group_ids[start]))
        assert rollouts.temperature == CONFIG.sampling.temperature
        assert rollouts.top_p == 1.0
    assert len(set(groups)) == len(groups) == len(UNITS) * shape.prompts_per_unit


def test_prompts_are_stored_as_encoded_and_none_is_held_out(made):
    for shard in made[2].values():
        rollouts = shard.rollouts
        for row in range(rollouts.rows):
            prompt = TASK.tokenizer.decode(rollouts.prompt_tokens[row, : rollouts.prompt_lengths[row]])
            assert not TASK.is_held_out(prompt)
            assert rollouts.gold_answers[row] == str(sum(map(int, prompt[:-1].split("+"))))


def test_all_units_are_sampled_by_one_program(made, make_run):
    _, generator = make_run("other")
    generator.make([UnitId(0, 0, 0)])
    programs = generate._cache_size()
    generator.make([UnitId(4, 5, 1), UnitId(4, 7, 0)])
    assert generate._cache_size() == programs
