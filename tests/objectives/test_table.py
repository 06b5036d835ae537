"""The table: names, defaults, kinds of hyperparameters, and what `get` refuses."""

import dataclasses

import jax
import pytest

from m2po_jax import objectives
from m2po_jax.config import ConfigError
from tests.objectives import batches, reference

ALL_NAMES = (
    "m2po, m2po_clip, m2po_all_tokens, grpo, grpo_no_tr, gspo, dapo, dr_grpo, cispo, decoupled_ppo, tis, icepop, sapo,"
    " topr, gmpo"
)


def test_names_stand_in_the_order_of_the_table():
    assert objectives.names() == tuple(ALL_NAMES.split(", ")) == reference.NAMES


@pytest.mark.parametrize("name", reference.NAMES)
def test_defaults_are_those_of_the_papers(name):
    """The reference lists them; kinds too, so that 1 never stands for True."""
    defaults = objectives.defaults(name)
    assert defaults == reference.DEFAULTS[name]
    assert {key: type(x) for key, x in defaults.items()} == {
        key: type(x) for key, x in reference.DEFAULTS[name].items()
    }
    assert objectives.get(name).config == objectives.get(name, **defaults).config


@pytest.mark.parametrize("name", reference.NAMES)
def test_each_row_says_what_it_needs(name):
    definition = objectives.get(name).definition
    assert definition.proximal == (name in ("m2po_all_tokens", "decoupled_ppo", "tis", "icepop"))
    assert objectives.normalization(name) == ("none" if name == "dr_grpo" else "std")
    whole = name in ("m2po", "m2po_clip", "m2po_all_tokens")
    assert objectives.get(name).needs_whole_batch == whole
    if whole:
        assert not objectives.get(name, mask_scope="microbatch").needs_whole_batch


@pytest.mark.parametrize("name", reference.NAMES)
def test_every_hyperparameter_is_documented_and_takes_its_kind_alone(name):
    objective = objectives.get(name)
    assert dataclasses.is_dataclass(objective.config) and type(objective.config).__doc__
    for key, value in objectives.defaults(name).items():
        wrong = {bool: ["yes", 1, 0.0, None], str: ["other", 1.0, True, None]}
        for bad in wrong.get(type(value), ["0.1", True, None, float("nan"), float("inf")]):
            with pytest.raises(ConfigError, match=f"objective.{key} is ") as error:
                objectives.get(name, **{key: bad})
            assert "\n" not in str(error.value)
        if isinstance(value, float):
            assert type(getattr(objectives.get(name, **{key: value}).config, key)) is float


@pytest.mark.parametrize(
    ("name", "hyperparameters", "words"),
    [
        ("gropo", {}, "no objective 'gropo'; did you mean grpo"),
        ("zzz", {}, f"no objective 'zzz' .known: {ALL_NAMES}.$"),
        ("m2po", {"treshold": 0.1}, "objective m2po has no hyperparameter 'treshold'; did you mean threshold"),
        ("grpo_no_tr", {"threshold": 0.1}, "no hyperparameter 'threshold' .known: aggregation, length_constant, kl_c"),
        ("m2po", {"threshold": "0.1"}, "objective.threshold is '0.1': use a finite Python number"),
        ("m2po", {"threshold": True}, "threshold is True: use a finite Python number"),
        ("m2po", {"threshold": float("nan")}, "threshold is nan"),
        ("m2po", {"threshold": -0.1}, "threshold is -0.1: the second-moment threshold is 0 or more"),
        ("m2po_clip", {"threshold": -0.1}, "threshold is -0.1"),
        ("m2po", {"mask_scope": "batch"}, "mask_scope is 'batch': use one of minibatch, microbatch"),
        ("m2po_all_tokens", {"threshold": -1.0}, "threshold is -1.0"),
        ("m2po_all_tokens", {"denominator": "masked"}, "denominator is 'masked': use one of all, kept"),
        (
            "m2po_all_tokens",
            {"denominator": "kept", "aggregation": "sequence_mean"},
            "denominator kept goes with aggregation token_mean, not sequence_mean",
        ),
        ("grpo", {"epsilon_low": 1.0}, "epsilon_low is 1.0: use 0 or more, below 1"),
        ("grpo", {"epsilon_high": -0.1}, "epsilon_high is -0.1: use 0 or more"),
        ("gspo", {"epsilon_low": -1}, "epsilon_low is -1"),
        ("dapo", {"overlong_filter": 1}, "overlong_filter is 1: use True or False"),
        ("dr_grpo", {"length_constant": 0.0}, "length_constant is 0.0: use a positive number"),
        ("cispo", {"epsilon_low": 1.5}, "epsilon_low is 1.5: use 0 to 1"),
        ("cispo", {"epsilon_high": -1.0}, "epsilon_high is -1.0"),
        ("decoupled_ppo", {"epsilon_low": 1.0}, "epsilon_low is 1.0"),
        ("tis", {"cap": 0.0}, "cap is 0.0: use a positive number"),
        ("icepop", {"weight_low": 0.0}, "weight_low 0.0 and weight_high 5.0: use 0 < low <= high"),
        ("icepop", {"weight_high": 0.1}, "weight_low 0.5 and weight_high 0.1"),
        ("sapo", {"tau_positive": 0.0}, "tau_positive is 0.0: use a positive number"),
        ("sapo", {"tau_negative": -1.0}, "tau_negative is -1.0"),
        ("topr", {"cap": -1.0}, "cap is -1.0"),
        ("gmpo", {"clip_low": -0.1}, "clip_low is -0.1: use 0 or more"),
        ("gmpo", {"clip_high": -0.1}, "clip_high is -0.1"),
    ],
)
def test_bad_names_and_values_are_refused_in_one_line(name, hyperparameters, words):
    with pytest.raises(ConfigError, match=words) as error:
        objectives.get(name, **hyperparameters)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("function", [objectives.defaults, objectives.normalization])
def test_unknown_names_are_refused_wherever_they_are_given(function):
    with pytest.raises(ConfigError, match="no objective 'gmp'; did you mean gmpo"):
        function("gmp")


def test_an_objective_is_static_under_jit_and_equal_to_its_twin():
    traced = []

    @jax.jit
    def count(x):
        traced.append(1)
        return x

    def loss(objective, *arrays):
        return count(objective(*arrays)[0])

    jitted = jax.jit(loss, static_argnums=0)
    for objective in (objectives.get("grpo"), objectives.get("grpo", epsilon_low=0.2)):
        jitted(objective, *batches.normal_batch(0))
    assert traced == [1]
    assert objectives.get("m2po", threshold=1) == objectives.get("m2po", threshold=1.0)
    assert objectives.get("m2po") != objectives.get("m2po_clip")
    assert len({objectives.get(name) for name in objectives.names()}) == len(objectives.names())
