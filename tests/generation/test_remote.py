"""A real vLLM draws the responses: what it says of weights, temperature and log-probs is checked, never believed."""

import json
import subprocess
import sys
import urllib.request
from dataclasses import replace

import numpy as np
import pytest

from m2po_jax import catalog
from m2po_jax.config import SamplingConfig
from m2po_jax.generation import Generator
from m2po_jax.generation.handover import Handover
from m2po_jax.generation.remote import RemoteSampler
from m2po_jax.generation.scoring import score
from m2po_jax.generation.server import Server, ServerError
from m2po_jax.models import Transformer, huggingface
from m2po_jax.rollouts import Store, UnitId, read_shard, weights
from m2po_jax.tasks import make_task
from tests import tiny, tiny_text
from tests.models import policies
from tests.vllm_server import Vllm

pytestmark = [pytest.mark.extra, pytest.mark.timeout(1500), pytest.mark.usefixtures("standard_promotion")]

SHAPE = {"width": 64, "head_dim": 32, "query_heads": 2, "kv_heads": 1, "mlp_width": 64, "tie_embeddings": False}
PROCESSED = ("--logprobs-mode", "processed_logprobs")


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    """Started by the first test of each mode."""
    server = Vllm(tmp_path_factory.mktemp("vllm") / "log")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_text.save_model(tmp_path_factory.mktemp("models") / "tiny", **SHAPE)


@pytest.fixture(scope="module")
def processed(vllm, model):
    """A server whose log-probs are at the sampling temperature."""
    vllm.start(model, *PROCESSED)
    vllm.wait()
    return vllm


class Generating:
    """A run with two versions of weights, and a generator whose responses a server draws."""

    def __init__(self, model, url, directory, command=None, **sampling):
        config = catalog.with_sources(tiny_text.at(tiny_text.configs()[0], model))
        sampled = SamplingConfig(**{"temperature": 0.7, "max_new_tokens": 24, "train_on_truncated": True} | sampling)
        self.config = replace(config, sampling=sampled, rollouts=replace(config.rollouts, rescore=True))
        self.task = make_task(self.config.task, self.config.model.source)
        self.model = Transformer(self.config.model, self.task.tokenizer.vocab_size)
        shape = tiny_text.MODEL | SHAPE | {"tie_embeddings": self.config.model.tie_embeddings}
        self.params = {0: huggingface.load(model, self.config.model), 2: policies.random_policy(None, 1, **shape)[1]}
        self.store = Store.open(directory / "run", create=True)
        for version, params in self.params.items():
            weights.publish(self.store, version, params)
        self.notes: list[str] = []
        self.server = Server(url, self.notes.append, patience_s=600.0)
        self.handover = Handover(directory / "served", self.config.model, str(model), self.server, command)
        self.sampler = RemoteSampler(
            self.task,
            self.model,
            self.config.sampling,
            self.server,
            self.handover,
            self.notes.append,
            tolerance=0.02,
            restarts_s=600.0 if command else 5.0,
        )
        self.generator = Generator(self.store, "run", self.config, self.task, self.model, sampler=self.sampler)

    def differences(self, unit):
        """Log-probs of a unit's shard against our forward pass under its version and under the other, float64."""
        rollouts = read_shard(self.store, unit).rollouts
        rows = zip(rollouts.prompt_tokens, rollouts.prompt_lengths, strict=True)
        prompts = [tokens[:length].tolist() for tokens, length in rows]
        rows = zip(rollouts.response_tokens, rollouts.response_lengths, strict=True)
        responses = [tokens[:length].tolist() for tokens, length in rows]
        mask = np.arange(rollouts.response_tokens.shape[1]) < rollouts.response_lengths[:, None]
        widths = (self.task.max_prompt_tokens, rollouts.response_tokens.shape[1])

        def apart(params):
            scored = score(self.model, params, prompts, responses, widths, self.config.sampling.temperature)
            return np.abs(scored - rollouts.behavior_logprobs)[mask]

        other = 2 if unit.version == 0 else 0
        return apart(self.params[unit.version]), apart(self.params[other])

    def assert_of_its_version(self, unit):
        own, other = self.differences(unit)
        assert own.max() < 1e-3 < 0.1 < other.mean()


@pytest.fixture
def generating(model, tmp_path):
    made = []

    def make(url, model=model, **options):
        made.append(Generating(model, url, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.sampler.close()


def call(vllm, path, body):
    request = urllib.request.Request(
        f"{vllm.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    urllib.request.urlopen(request, timeout=60).read()


def test_tokens_and_log_probs_are_those_of_the_units_version(processed, generating):
    """Also REGRESSIONS 13, 17 and 18: ids as they were sampled; 0, 2, 0 and nothing of the weights before."""
    run = generating(processed.url)
    units = [UnitId(0, 0, 0), UnitId(0, 0, 1), UnitId(2, 1, 0), UnitId(0, 1, 0)]
    run.generator.make(units)
    stops = run.task.tokenizer.stop_ids
    for unit in units:
        run.assert_of_its_version(unit)
        rollouts = read_shard(run.store, unit).rollouts
        lasts = rollouts.response_tokens[np.arange(rollouts.rows), rollouts.response_lengths - 1]
        assert [reason == "stop" for reason in rollouts.finish_reasons] == [token in stops for token in lasts]
        own, _ = run.differences(unit)
        rescored = np.abs(rollouts.rescored_logprobs - rollouts.behavior_logprobs)
        assert rescored.sum() == pytest.approx(own.sum(), rel=1e-3)
        assert len({tuple(row) for row in rollouts.response_tokens[:4].tolist()}) > 1, "samples of a group differ"
    loads = [note for note in run.notes if "has version" in note]
    assert [note.split("has version ")[1][0] for note in loads] == ["0", "2", "0"]


def test_weights_changed_behind_the_generator_are_noticed(processed, generating):
    run = generating(processed.url)
    run.generator.make([UnitId(0, 0, 0), UnitId(2, 0, 0)])
    (old,) = run.handover.directory.glob("0000000-*")
    call(processed, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(old)}})
    run.generator.make([UnitId(2, 0, 1)])
    assert any("once more" in note for note in run.notes)
    run.assert_of_its_version(UnitId(2, 0, 1))


def test_a_server_that_does_not_load_what_it_is_given_is_refused(processed, generating):
    run = generating(processed.url)
    run.generator.make([UnitId(0, 0, 0)])
    run.handover._command = "true"
    with pytest.raises(ServerError, match="does not have version 2, which it was given"):
        run.generator.make([UnitId(2, 0, 0)])


def test_log_probs_after_truncation_are_refused(processed, generating):
    run = generating(processed.url, top_p=0.9)
    with pytest.raises(ServerError, match="log-probs after truncation"):
        run.generator.make([UnitId(0, 0, 0)])


def test_a_server_that_dies_and_comes_back_with_other_weights_is_given_them_again(processed, model, generating):
    """SIGKILL in the middle of responses; it then starts with the model it was first given, and raw log-probs."""
    run = generating(processed.url, temperature=1.0)
    run.generator.make([UnitId(2, 0, 0)])
    begun = run.generator.begin(UnitId(2, 0, 1))
    processed.kill()
    processed.start(model)
    run.generator.finish(begun)
    run.assert_of_its_version(UnitId(2, 0, 1))
    hot = generating(processed.url, temperature=0.7)
    with pytest.raises(ServerError, match=r"at temperature 1, not at sampling.temperature 0.7: .*processed_logprobs"):
        hot.generator.make([UnitId(0, 1, 0)])
    cut = generating(processed.url, temperature=1.0, top_p=0.9)
    cut.generator.make([UnitId(0, 1, 1)])
    cut.assert_of_its_version(UnitId(0, 1, 1))


def test_a_learner_and_a_generator_with_a_server_finish_a_run(processed, model, user_env, tmp_path):
    """As processes; each version is handed over, and every age is as the policy says.

    The server's random numbers are its own, so rewards may teach nothing: weight decay makes each version another one.
    """
    env, run = tiny.subprocess_env(user_env), tmp_path / "run"
    shared = {"env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
    python = [sys.executable, "-m", "m2po_jax"]
    flags = ["--model.source", str(model), "--learner.learning-rate", "0.03", "--learner.weight-decay", "0.1"]
    flags += ["--staleness.k", "0"]
    learn = [*python, "learn", f"{tiny_text.__file__}:arithmetic", "--run", str(run), *flags]
    learner = subprocess.Popen(learn, **shared)
    generate = [*python, "generate", str(run), "--server.url", processed.url, "--mesh.data", "1"]
    generator = subprocess.Popen(generate, **shared)
    try:
        said, learned = generator.communicate(timeout=900)[0], learner.communicate(timeout=60)[0]
    finally:
        learner.kill(), generator.kill()
    assert generator.returncode == 0, said
    assert learner.returncode == 0, learned
    assert said.count("has version") >= 2 and "once more" not in said
    verified = subprocess.run([*python, "verify", str(run)], **{**shared, "stdout": None, "stderr": None})
    assert verified.returncode == 0


def test_tied_embeddings_need_a_restart_on_cpus_and_nothing_less_is_accepted(processed, generating, tmp_path):
    """vLLM 0.32 on CPUs reloads the input embedding and keeps the packed output one; the probe tells."""
    tied = tiny_text.save_model(tmp_path / "tied", **SHAPE | {"tie_embeddings": True})
    run = generating(processed.url, tied, command=processed.restart, temperature=1.0)
    run.generator.make([UnitId(0, 0, 0)])
    run.generator.make([UnitId(2, 0, 0)])
    for unit in (UnitId(0, 0, 0), UnitId(2, 0, 0)):
        run.assert_of_its_version(unit)
    reloading = generating(processed.url, tied, temperature=1.0)
    with pytest.raises(ServerError, match=r"does not have version 0, .* with --server.reload COMMAND"):
        reloading.generator.make([UnitId(0, 0, 1)])
