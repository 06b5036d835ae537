"""`m2po export`: what transformers loads says what the run's policy says; untouched weights come back byte for byte."""

import json
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from m2po_jax.config import ConfigError, UserError
from m2po_jax.exporting import export
from m2po_jax.models import Transformer, huggingface
from m2po_jax.rollouts import open_run, weights
from tests import tiny, tiny_text
from tests.models import published, reference
from tests.tasks import texts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_promotion")]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_text.save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def run(model, standard_promotion, tmp_path_factory) -> Path:
    """A finished run that began from the directory `model`."""
    run = tmp_path_factory.mktemp("runs") / "run"
    tiny_text.train(tiny_text.at(tiny_text.BASE, model), run)
    return run


def policy(run: Path, version: int, vocab_size: int | None = None) -> tuple[Transformer, dict]:
    store, info = open_run(run)
    model = Transformer(info.config.model, vocab_size)
    return model, weights.load(store, version, jax.eval_shape(model.init_params, jax.random.key(0)))[0]


def theirs(directory: Path):
    reason = "compares with transformers on torch: pip install 'm2po-jax[dev]'"
    torch = pytest.importorskip("torch", reason=reason)
    transformers = pytest.importorskip("transformers", reason=reason)
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def test_the_base_policy_comes_back_byte_for_byte(run, model, tmp_path):
    said = export(str(run), str(tmp_path / "out"), version=0)
    assert said.startswith(f"wrote {tmp_path / 'out'}: version 0 of {run} (weights ")
    assert said.endswith(f"with the tokenizer of {model}")
    assert {file.name for file in model.iterdir()} == {file.name for file in (tmp_path / "out").iterdir()}
    for file in model.iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_the_newest_policy_says_the_same_in_transformers(run, tmp_path):
    export(str(run), str(tmp_path / "out"))
    tokens = list(range(3, 40))
    ours, base = (reference.logits(*policy(run, version), tokens) for version in (6, 0))
    found = published.logits(theirs(tmp_path / "out"), tokens)
    np.testing.assert_allclose(found, ours, atol=1e-4)
    assert np.abs(ours - base).max() > 1e-3
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == texts.TEMPLATE


def test_a_policy_over_characters_is_exported_without_a_tokenizer(tmp_path):
    said = export(str(tiny.base_run()), str(tmp_path / "out"), dtype="float32")
    assert said.endswith("without a tokenizer: its prompts are characters")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    tokens = [2, 12, 3, 13]
    ours = reference.logits(*policy(tiny.base_run(), 0, 15), tokens)
    np.testing.assert_allclose(published.logits(theirs(tmp_path / "out"), tokens), ours, atol=1e-4)


def test_another_dtype_and_another_source_are_taken(run, model, tmp_path):
    tokenizer = texts.save_tokenizer(tmp_path / "tokenizer")
    export(str(run), str(tmp_path / "out"), source=str(tokenizer))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    export(str(run), str(tmp_path / "half"), dtype="float16")
    params = huggingface.load(tmp_path / "half", huggingface.read_config(tmp_path / "half"))
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).astype(np.float16).astype(np.float32), policy(run, 6)[1])
    jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_files_may_be_read_by_who_may_read_the_folder(run, tmp_path):
    export(str(run), str(tmp_path / "out"))
    modes = {file.name: file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_what_cannot_be_exported_is_said_in_a_line(run, model, tmp_path):
    with pytest.raises(UserError, match="has no weights of version 3: it has 0,"):
        export(str(run), str(tmp_path / "out"), version=3)
    with pytest.raises(UserError, match="is not a run"):
        export(str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(UserError, match="exists: name a directory that does not"):
        export(str(run), str(model))
    with pytest.raises(UserError, match="is no directory"):
        export(str(run), str(tmp_path / "out"), source=str(tmp_path / "nowhere"))
    other = tmp_path / "other"
    other.mkdir()
    rows = json.loads((model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(rows | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match="config.json means model.layers 3, but the model has 2"):
        export(str(run), str(tmp_path / "out"), source=str(other))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write .*file/out: (Not a directory|File exists)"):
        export(str(run), str(tmp_path / "file" / "out"))
    with pytest.raises(UserError, match="cannot write .*: File name too long"):
        export(str(run), str(tmp_path / ("x" * 300)))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".exporting-*"))


def test_of_two_exports_to_one_name_one_is_whole_and_the_other_refused(run, model, tmp_path):
    said, refused = [], []

    def one():
        try:
            said.append(export(str(run), str(tmp_path / "out"), version=0))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(said) == 1 and len(refused) == 2
    assert {file.name for file in (tmp_path / "out").iterdir()} == {file.name for file in model.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_command_says_what_it_wrote(user_env, run, tmp_path):
    env = tiny.subprocess_env(user_env)
    done = tiny.run(env, "-m", "m2po_jax", "export", run, "--version", "0", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert "version 0" in done.stdout
    refused = tiny.run(env, "-m", "m2po_jax", "export", run, "--out", tmp_path / "out")
    assert (refused.returncode, refused.stderr) == (
        2, f"m2po: {tmp_path / 'out'} exists: name a directory that does not\n"
    )  # fmt: skip
