"""Plans end to end: programs of a small model compiled for a slice, and what is refused."""

import importlib.util
import json
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from m2po_jax import catalog
from m2po_jax.cli import main
from m2po_jax.config import ConfigError, MeshConfig
from m2po_jax.learner.batches import mini_batches, packing_of
from m2po_jax.models import logprobs
from m2po_jax.models.mesh import make_mesh
from m2po_jax.objectives import get
from m2po_jax.planning import chips, programs
from m2po_jax.planning.costs import costs
from m2po_jax.planning.hlo import parse
from m2po_jax.planning.plan import hbm_needed, hbm_used
from m2po_jax.planning.storage import parameters
from m2po_jax.rollouts import Rollouts
from tests.planning.small import SMALL

HERE = "tests/planning/small.py"

pytestmark = pytest.mark.usefixtures("standard_promotion")


def refusal(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["plan", *arguments])
    assert exit_.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    return said[0]


@pytest.fixture(scope="module")
def planned(tmp_path_factory, standard_promotion):
    out = tmp_path_factory.mktemp("plan")
    with pytest.raises(SystemExit) as exit_:
        main(["plan", f"{HERE}:small", "--topology", "v5e:2x4", "--out", str(out)])
    return exit_.value.code, json.loads((out / "plan.json").read_text()), (out / "plan.txt").read_text()


@pytest.mark.slow
@pytest.mark.tpu
def test_a_small_model_is_planned(planned):
    code, plan, text = planned
    assert code == 0 and plan["fits"]
    assert plan["mesh"] == {"data": 1, "fsdp": 4, "tensor": 2}
    update = plan["update"]
    cut = parameters(SMALL) / 8
    assert 4 * cut <= update["memory"]["params"] < 4.1 * cut
    assert 8 * cut <= update["memory"]["optimizer"] < 8.1 * cut
    assert update["memory"]["peak"] < plan["chip"]["hbm_bytes"]
    assert "update fits" in text and "not a prediction" in text
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.tpu
def test_memory_is_what_the_compiler_lays_out_with_arguments_counted_once(planned):
    memory = planned[1]["update"]["memory"]
    parts = [memory[name] for name in ("params", "optimizer", "batch", "working", "code")]
    assert memory["peak"] == sum(parts) and min(parts) > 0


@pytest.mark.slow
@pytest.mark.tpu
def test_a_generator_stands_on_the_smallest_slice_with_a_policy_cut_over_heads(planned):
    generator, text = planned[1]["generator"], planned[2]
    assert (generator["topology"], generator["devices"], generator["tensor"]) == ("v5e:2x2", 4, 2)
    assert 2 * parameters(SMALL) / 2 <= generator["program"]["memory"]["params"] < 2.1 * parameters(SMALL) / 2
    assert "generation of one work unit on v5e:2x2" in text and "tokens/s, a bound too" in text
    gathers = generator["program"]["costs"]["collectives"].get("all-gather", {"payload_bytes": 0})
    weights = 2 * parameters(SMALL)
    assert gathers["payload_bytes"] < SMALL.sampling.max_new_tokens * weights / 10  # no weights at each token


@pytest.mark.slow
@pytest.mark.tpu
def test_the_attention_kernel_is_compiled_and_counted_loops_included(planned):
    update = planned[1]["update"]
    calls = {name: count for name, count in update["costs"]["kernels"].items() if "splash" in name}
    layers, parts = SMALL.model.layers, SMALL.learner.micro_batches
    assert sum(calls.values()) == layers * parts * 5  # statistics, forward, again for backward, two gradients
    assert update["costs"]["flops_once"] == pytest.approx(update["cost_analysis_flops"], rel=0.2)
    counted = (update["costs"]["flops"] + update["kernel_flops"]) * planned[1]["devices"]
    assert counted == pytest.approx(update["executed_flops"], rel=0.3)


@pytest.mark.slow
@pytest.mark.tpu
def test_what_does_not_fit_is_said_with_what_to_change(capsys, tmp_path):
    flags = ["--topology", "v5e:2x2", "--mesh.fsdp", "4", "--mesh.tensor", "1", "--no-generator"]
    with pytest.raises(SystemExit) as exit_:
        main(["plan", f"{HERE}:large", *flags, "--out", str(tmp_path)])
    assert exit_.value.code == 1
    said = capsys.readouterr().out
    assert "update DOES NOT FIT: parameters and optimiser alone are too large; or take a larger slice" in said
    assert not json.loads((tmp_path / "plan.json").read_text())["fits"]


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--topology", "v5q:2x4"), "did you mean v5e:2x4"),
        (("--topology", "v5e:2x4", "--mesh.fsdp", "3"), "mesh.fsdp 3 times mesh.tensor 2 does not divide 8 devices"),
        (("--topology", "v5e:2x4", "--mesh.fsdp", "2", "--mesh.tensor", "4"), "model.query_heads 2 cannot be cut"),
        (("--topology", "v5e:2x4", "--learner.micro-batches", "16"), "2 rows of a micro-batch"),
        (("--topology", "v5e:2x4", "--rollouts.units-per-batch", "16"), "1 prompts of a work unit"),
        (("--topology", "v5e:2x4", "--generator-topology", "v5e:3x3"), "there is no topology v5e:3x3: use one of"),
    ],
)
def test_what_cannot_be_cut_is_refused_in_one_line(flags, said, capsys, tmp_path):
    assert said in refusal(capsys, f"{HERE}:small", *flags, "--out", str(tmp_path))


def test_without_the_compiler_it_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refusal(capsys, f"{HERE}:small", "--topology", "v5e:2x4", "--out", str(tmp_path))
    assert 'pip install "jax[tpu]==' in said


def test_a_topology_that_does_not_exist_is_refused_before_anything_is_compiled(capsys, tmp_path):
    said = refusal(capsys, f"{HERE}:small", "--topology", "v5p:4x4", "--out", str(tmp_path))
    assert "v5p has 3 axes, as in v5p:2x2x1" in said


def test_without_a_configuration_an_example_is_given(capsys):
    assert "m2po plan experiments/plans.py:qwen3-8b --topology v5p:4x4x4" in refusal(capsys)


@pytest.mark.tpu
def test_a_vocabulary_left_to_a_tokenizer_is_refused(capsys, tmp_path):
    flags = ("--topology", "v5e:2x2", "--out", str(tmp_path))
    assert "model.vocab_size is None" in refusal(capsys, "tests/tiny.py:tiny", *flags)


def test_the_train_state_lies_where_its_parameters_lie(devices):
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2), devices)
    state = programs.abstract_state(SMALL, mesh)
    moments = [leaf for leaf in _leaves(state.opt_state) if leaf.ndim == 4]
    assert len(moments) == 8  # two of each of q, k, v, o
    assert {leaf.sharding.spec for leaf in moments} == {
        leaf.sharding.spec for leaf in _leaves(state.params) if leaf.ndim == 4
    }
    assert programs.device_bytes(state.opt_state) == pytest.approx(2 * programs.device_bytes(state.params), rel=0.01)
    large = replace(SMALL, learner=replace(SMALL.learner, micro_batches=16))
    with pytest.raises(ConfigError, match="micro_batches"):
        programs.lower_update(large, mesh)


@pytest.mark.parametrize("packing", [True, False])
def test_the_planned_mini_batch_is_that_of_responses_of_full_length(devices, packing):
    config = replace(SMALL, learner=replace(SMALL.learner, packing=packing))
    rows, prompt, response = config.mini_batch_rows, 128, 128
    full = Rollouts(
        np.ones((rows, prompt), np.int32), np.full(rows, prompt, np.int32), np.ones((rows, response), np.int32),
        np.full(rows, response, np.int32), np.zeros((rows, response), np.float32), None, np.zeros(rows, np.float32),
        [""] * rows, np.zeros(rows, np.int64), np.zeros(rows, np.int32), ["stop"] * rows, [""] * rows, [""] * rows,
        1.0, 1.0,
    )  # fmt: skip
    (real,) = mini_batches(full, 1, prompt, response, 0, packing_of(config, prompt, row_parts=4))
    planned = programs.abstract_batch(config, make_mesh(MeshConfig(fsdp=4, tensor=2), devices), get("m2po"))
    shapes = lambda batch: jax.tree.map(lambda x: (x.shape, str(x.dtype)), batch)  # noqa: E731
    assert shapes(planned) == shapes(real) and (planned.packed is not None) == packing
    assert programs.row_widths(config) == (256, 128)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(fsdp=8), MeshConfig(fsdp=2, tensor=2)])
def test_the_gradient_of_an_embedding_crosses_the_mesh_once_however_many_chunks_its_logits_come_in(
    mesh, devices, monkeypatch
):
    def sent(chunk_tokens):
        monkeypatch.setattr(logprobs, "CHUNK_TOKENS", chunk_tokens)
        program = programs.lower_update(SMALL, make_mesh(mesh, devices)).compile()
        return costs(parse(program.as_text()), len(devices)).sent_bytes

    few, many = sent(128), sent(8)
    assert 0 < many < 1.01 * few


def _leaves(tree):
    return jax.tree.leaves(tree)


def test_what_the_compiler_says_it_needs_is_read():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of"
    )
    assert hbm_needed(f"{message} 15.75G hbm. Exceeded hbm capacity by 4.75G.") == int(20.5 * 2**30)
    message = "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (18.38G)"
    assert hbm_needed(f"{message} exceeds available HBM (15.75G).") == int(18.38 * 2**30)
    assert hbm_needed("INTERNAL: something else") is None
    report = "Memory Space: default (color=0)\nTotal bytes: 25769808896 (24.00GiB)\n  6.00GiB\n\nMemory Space: vmem"
    assert hbm_used(f"{report} (color=1)\nTotal bytes: 10240") == 25769808896
    assert hbm_used("") == 0


def test_every_planned_model_is_a_configuration_with_a_known_size():
    sizes = {config.name: parameters(config) for config in catalog.find_experiment("experiments/plans.py")}
    expected = {
        "qwen3-1-7b": 1.72e9, "llama-3-2-3b": 3.21e9, "qwen3-4b": 4.02e9, "qwen2-5-math-7b": 7.62e9,
        "qwen3-8b": 8.19e9, "qwen2-5-32b": 32.8e9,
    }  # fmt: skip
    assert sizes == pytest.approx(expected, rel=0.005)


def test_topologies_of_the_table_of_slices_are_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "--topology" in said and "v5p:4x4x4" in said and chips.CHIPS["v5p"].dimensions == 3
