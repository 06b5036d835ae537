"""The table: names, defaults, and what `get` refuses."""

import jax
import jax.numpy as jnp
import pytest

from m2po_jax import objectives
from m2po_jax.config import ConfigError
from tests.objectives import batches


def test_names_and_defaults():
    assert objectives.names() == ("m2po", "m2po_clip", "grpo", "grpo_no_tr", "gspo")
    assert objectives.defaults("m2po") == objectives.defaults("m2po_clip") == {"threshold": 0.04}
    assert objectives.defaults("grpo") == {"epsilon_low": 0.2, "epsilon_high": 0.2}
    assert objectives.defaults("grpo_no_tr") == {}
    assert objectives.defaults("gspo") == {"epsilon_low": 3e-4, "epsilon_high": 4e-4}


@pytest.mark.parametrize(
    ("name", "hyperparameters", "words"),
    [
        ("gropo", {}, "no objective 'gropo'; did you mean grpo"),
        ("zzz", {}, "known: m2po, m2po_clip, grpo, grpo_no_tr, gspo"),
        ("m2po", {"treshold": 0.1}, "'treshold'; did you mean threshold"),
        ("grpo_no_tr", {"threshold": 0.1}, "grpo_no_tr has no hyperparameter 'threshold' .known: none"),
        ("m2po", {"threshold": "0.1"}, "threshold is '0.1'"),
        ("m2po", {"threshold": True}, "threshold is True"),
        ("m2po", {"threshold": float("nan")}, "threshold is nan"),
        ("m2po", {"threshold": -0.1}, "threshold is -0.1"),
        ("grpo", {"epsilon_low": 1.0}, "epsilon_low is 1.0"),
        ("grpo", {"epsilon_high": -0.1}, "epsilon_high is -0.1"),
        ("gspo", {"epsilon_low": -1}, "epsilon_low is -1"),
    ],
)
def test_bad_names_and_values_are_refused_in_one_line(name, hyperparameters, words):
    with pytest.raises(ConfigError, match=words) as error:
        objectives.get(name, **hyperparameters)
    assert "\n" not in str(error.value)


def test_an_objective_is_static_under_jit_and_equal_to_its_twin():
    traced = []

    @jax.jit
    def count(x):
        traced.append(1)
        return x

    def loss(objective, *arrays):
        return count(objective(*arrays)[0])

    jitted = jax.jit(loss, static_argnums=0)
    for objective in (objectives.get("m2po"), objectives.get("m2po", threshold=0.04)):
        jitted(objective, *batches.normal_batch(0))
    assert traced == [1]
    assert objectives.get("m2po", threshold=1) == objectives.get("m2po", threshold=1.0)
    assert objectives.get("m2po") != objectives.get("m2po_clip")


@pytest.mark.parametrize(
    ("position", "value", "words"),
    [
        (0, jnp.zeros((4, 5)), "behavior_logprobs"),
        (0, jnp.zeros((4, 6), jnp.int32), "policy_logprobs"),
        (1, jnp.zeros((4,)), "behavior_logprobs"),
        (2, jnp.zeros((4, 2)), "advantages"),
        (3, jnp.ones((4, 6), jnp.int32), "response_mask"),
        (3, jnp.ones((4, 5), bool), "response_mask"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused_by_name(position, value, words):
    arrays = list(batches.normal_batch(0))
    arrays[position] = value
    for call in (objectives.get("m2po"), objectives.get("m2po").kept):
        with pytest.raises(TypeError, match=f"parameter '{words}'"):
            jax.eval_shape(lambda call=call: call(*arrays))
