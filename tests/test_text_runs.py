"""Training that starts from a Hugging Face directory: on addition and on questions in words, by configuration alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from m2po_jax import catalog
from m2po_jax.config import ConfigError, UserError
from m2po_jax.models import huggingface
from m2po_jax.rollouts import Store, open_run, weights
from m2po_jax.tasks import ModelTokenizer
from tests import tiny, tiny_text
from tests.models import smollm2
from tests.tasks import texts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]
ARITHMETIC, QUESTIONS = tiny_text.configs()


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_text.save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    return texts.write_questions(tmp_path_factory.mktemp("data") / "words.jsonl", texts.word_problems(60))


@pytest.fixture(scope="module")
def trained(model, questions, standard_promotion, tmp_path_factory) -> dict[str, tuple[Path, tiny.Watcher]]:
    """A finished run on each task."""
    runs = tmp_path_factory.mktemp("runs")
    return {
        config.name: (runs / config.name, tiny_text.train(tiny_text.at(config, model, questions), runs / config.name))
        for config in (ARITHMETIC, QUESTIONS)
    }


@pytest.mark.parametrize("name", ["arithmetic", "questions"])
def test_a_run_starts_from_the_directory_and_trains_on_stale_data(trained, model, name):
    run, watcher = trained[name]
    assert watcher.versions[-1] == 6
    assert any("base policy read from" in note for note in watcher.notes)
    assert watcher.doings[:3] == ["evaluating on 8 prompts", "generating, of version 0", "learning"]
    store, info = open_run(run)
    assert info.config.model.width == 16
    assert info.config.model.vocab_size == tiny_text.VOCAB_SIZE
    params = huggingface.load(model, info.config.model)
    assert weights.read_digest(store, 0) == weights.params_digest(params) != weights.read_digest(store, 6)
    records = [json.loads(store.get(path)) for path in sorted(store.list("batches")) if path.endswith(".json")]
    assert [record["staleness_updates"] for record in records] == [0, 2, 2]


@pytest.mark.parametrize("name", ["arithmetic", "questions"])
def test_shards_hold_the_models_own_tokens(trained, model, questions, name):
    run, _ = trained[name]
    rows = pd.read_parquet(run / "rollouts")
    tokenizer = ModelTokenizer(str(model))
    asked = {"arithmetic": "= Answer with the number alone.", "questions": "How many apples has she now?"}[name]
    for row in rows.itertuples():
        assert tokenizer.decode(row.prompt_tokens.tolist()).endswith(f"{asked}\n<|im_start|>assistant\n")
        assert row.response_text == tokenizer.decode(row.response_tokens.tolist())
        assert (row.response_tokens[-1] in tokenizer.stop_ids) == (row.finish_reason == "stop")
    assert max(tokens.max() for tokens in rows.response_tokens) >= tokenizer.vocab_size  # sampled, and survived
    assert len(rows) == 3 * 16
    diagnostics = pd.concat(pd.read_parquet(file) for file in sorted((run / "diagnostics").iterdir()))
    spelled = [tokenizer.token_text(token) for token in diagnostics.token_id]
    assert diagnostics.token_text.tolist() == spelled
    on_policy = diagnostics[diagnostics.staleness_updates == 0]
    np.testing.assert_allclose(on_policy.log_ratio, 0.0, atol=1e-5)


def test_a_stopped_run_ends_in_the_same_bits(trained, model, questions, tmp_path):
    config = catalog.with_sources(tiny_text.at(QUESTIONS, model, questions))
    tiny_text.train(config, tmp_path / "run", tiny.Watcher(stop_at=2))
    tiny_text.train(config, tmp_path / "run")
    whole, _ = trained["questions"]
    assert weights.read_digest(Store.open(tmp_path / "run"), 6) == weights.read_digest(Store.open(whole), 6)


def test_a_run_goes_on_without_the_weights_it_began_from(model, questions, tmp_path):
    """The tokenizer is needed, the weights are not: version 0 is the run's own."""
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    config = tiny_text.at(ARITHMETIC, copy)
    tiny_text.train(config, tmp_path / "run", tiny.Watcher(stop_at=2))
    for file in copy.glob("*.safetensors"):
        file.unlink()
    assert tiny_text.train(config, tmp_path / "run").versions[-1] == 6
    with pytest.raises(UserError, match="model.safetensors is missing"):
        tiny_text.train(config, tmp_path / "another")
    assert not (tmp_path / "another").exists()


def test_other_questions_under_the_same_name_are_noticed(model, questions, tmp_path):
    file = tmp_path / "words.jsonl"
    shutil.copy(questions, file)
    config = catalog.with_sources(tiny_text.at(QUESTIONS, model, file))
    tiny_text.train(config, tmp_path / "run", tiny.Watcher(stop_at=2))
    texts.write_questions(file, texts.word_problems(61))
    with pytest.raises(ConfigError, match="words.jsonl has changed: its SHA-256 is"):
        catalog.with_sources(open_run(tmp_path / "run")[1].config)


def test_files_may_move_but_not_change(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    shutil.copytree(model, first)
    tiny_text.train(tiny_text.at(ARITHMETIC, first), tmp_path / "run", tiny.Watcher(stop_at=2))
    first.rename(second)
    moved = tiny_text.at(ARITHMETIC, second)
    assert tiny_text.train(moved, tmp_path / "run", tiny.Watcher(stop_at=4)).versions[-1] == 4
    template = second / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "stranger"))
    with pytest.raises(ConfigError, match="task.tokenizer_sha256"):
        tiny_text.train(moved, tmp_path / "run")
    saved = replace(open_run(tmp_path / "run")[1].config, model=moved.model)
    with pytest.raises(ConfigError, match="second has another tokenizer or chat template"):
        catalog.with_sources(saved)


def test_what_cannot_run_is_refused_before_there_is_a_run(model, questions, tmp_path):
    def refusal(config):
        with pytest.raises(UserError) as raised:
            tiny_text.train(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
        assert "\n" not in str(raised.value)
        return str(raised.value)

    whole = tiny_text.at(QUESTIONS, model, questions)
    sampling = replace(whole.sampling, max_new_tokens=100)
    assert "is over model.max_positions 128" in refusal(replace(whole, sampling=sampling))
    assert "no/such/model" in refusal(ARITHMETIC)
    assert "no/such/questions.jsonl" in refusal(tiny_text.at(QUESTIONS, model))
    assert "evaluation.prompts 60" in refusal(replace(whole, evaluation=replace(whole.evaluation, prompts=60)))
    assert "model.width is 32" in refusal(replace(whole, model=replace(whole.model, width=32)))
    small = tiny_text.save_model(tmp_path / "small", vocab_size=280)
    assert "tokenizer.json has ids up to 299, but tensor" in refusal(tiny_text.at(ARITHMETIC, small))


def test_the_command_takes_the_files_as_flags(user_env, model, questions, tmp_path):
    env, arm = tiny.subprocess_env(user_env), "tests/tiny_text.py:questions"
    flags = ["--model.source", model, "--task.questions", questions, "--run", tmp_path / "run"]
    done = tiny.run(env, "-m", "m2po_jax", "train", arm, *flags)
    assert done.returncode == 0, done.stderr
    assert "at version 6" in done.stdout
    again = tiny.run(env, "-m", "m2po_jax", "train", tmp_path / "run")
    assert (again.returncode, again.stderr.count("Traceback")) == (0, 0)
    refused = tiny.run(env, "-m", "m2po_jax", "train", arm, "--run", tmp_path / "other")
    assert refused.returncode == 2
    assert refused.stderr.strip() == "m2po: cannot read no/such/questions.jsonl: No such file or directory"


@pytest.mark.extra
@pytest.mark.parametrize("name", ["arithmetic", "questions"])
def test_smollm2_trains(name, questions, tmp_path):
    """The experiment of the README with the real model, made small: two batches, the second one stale."""
    config = catalog.find_config(f"{tiny.ROOT}/experiments/smollm2.py:smollm2-{name}")
    config = replace(
        tiny_text.at(config, smollm2.directory(), questions if name == "questions" else None),
        sampling=replace(config.sampling, max_new_tokens=8),
        rollouts=replace(config.rollouts, prompts_per_batch=2, group_size=2),
        staleness=replace(config.staleness, k=2),
        learner=replace(config.learner, total_updates=4, checkpoint_every=4, learning_rate=1e-5),
        evaluation=replace(config.evaluation, every=4, prompts=4),
        mesh=replace(config.mesh, data=1),
    )
    watcher = tiny_text.train(config, tmp_path / "run")
    assert watcher.versions == [2, 4]
    rows = pd.read_parquet(tmp_path / "run" / "rollouts")
    assert len(rows) == 2 * 4
    assert all(text.isprintable() or "\n" in text for text in rows.response_text)
    sampled = pd.read_parquet(next((tmp_path / "run" / "diagnostics").glob("00000000*")))
    np.testing.assert_allclose(sampled.log_ratio, 0.0, atol=1e-3)
    shutil.rmtree(tmp_path / "run")  # 3 GB
