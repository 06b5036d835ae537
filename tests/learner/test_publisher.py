"""Weights published behind the learner's back."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2po_jax.config import UserError
from m2po_jax.learner.publisher import Publisher
from m2po_jax.rollouts import Store, weights

PARAMS = {"kernel": jnp.linspace(-3.0, 3.0, 4096).reshape(64, 64), "scale": jnp.linspace(0.0, 1.0, 64)}
SAME = jax.tree.map(lambda x: x.dtype, PARAMS)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store.open(tmp_path / "run", create=True)


@pytest.fixture
def slow(monkeypatch):
    """Writing begins half a second after the learner has gone on."""
    publish = weights.publish

    def late(*arguments):
        time.sleep(0.5)
        return publish(*arguments)

    monkeypatch.setattr(weights, "publish", late)


def test_parameters_may_be_donated_at_once(store, slow):
    publisher = Publisher(store, SAME)
    params = jax.tree.map(jnp.copy, PARAMS)
    for version in (0, 4):
        publisher.start(version, params)
        params = jax.jit(lambda p: jax.tree.map(lambda x: 2.0 * x, p), donate_argnums=0)(params)
    publisher.wait()
    for version in (0, 4):
        loaded, _ = weights.load(store, version, PARAMS)
        expected = jax.tree.map(lambda x, factor=2.0 ** (version // 4): x * factor, PARAMS)
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    publisher.close()


def test_the_learner_goes_on_while_weights_are_written(store, slow):
    publisher = Publisher(store, SAME)
    publisher.start(0, PARAMS)
    assert weights.versions(store) == []
    publisher.wait(0)
    assert weights.versions(store) == [0]
    publisher.wait(0)
    publisher.wait(7)  # nobody started it: it is there, or it is not
    publisher.close()


def test_matrices_are_published_in_the_dtype_of_generators(store):
    publisher = Publisher(store, {"kernel": jnp.bfloat16, "scale": jnp.float32})
    publisher.start(4, PARAMS)
    publisher.wait()
    dtypes = {"kernel": jax.ShapeDtypeStruct((64, 64), jnp.bfloat16), "scale": PARAMS["scale"]}
    loaded, digest = weights.load(store, 4, dtypes)
    np.testing.assert_array_equal(loaded["kernel"], PARAMS["kernel"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(loaded["scale"], PARAMS["scale"])
    assert digest == weights.params_digest(loaded)
    publisher.close()


def test_what_went_wrong_is_said_by_wait(store, monkeypatch):
    def full(*arguments):
        raise UserError("no space left to write it")

    publisher = Publisher(store, SAME)
    monkeypatch.setattr(weights, "publish", full)
    publisher.start(0, PARAMS)
    with pytest.raises(UserError, match="no space left"):
        publisher.wait()
    publisher.close()
