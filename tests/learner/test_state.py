import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from m2po_jax.config import LearnerConfig
from m2po_jax.learner.state import apply_gradients, init_state, learning_rate_schedule, make_optimizer

pytestmark = pytest.mark.usefixtures("standard_promotion")

PARAMS = {"a": np.array([1.0, -2.0], np.float32), "b": np.array([[0.5]], np.float32)}


def config(**changes):
    return LearnerConfig(
        **{"learning_rate": 0.1, "warmup_updates": 0, "decay_updates": None, "updates_per_batch": 1, **changes}
    )


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [(0, [0.1, 0.1, 0.1]), (1, [0.1, 0.1, 0.1]), (2, [0.05, 0.1, 0.1]), (4, [0.025, 0.05, 0.075, 0.1, 0.1])],
)
def test_the_rate_rises_in_equal_steps_to_its_peak(warmup, expected):
    schedule = learning_rate_schedule(config(warmup_updates=warmup))
    np.testing.assert_allclose([float(schedule(step)) for step in range(len(expected))], expected, rtol=1e-6)


def test_the_rate_falls_in_equal_steps_to_its_share_and_stays():
    schedule = learning_rate_schedule(
        config(warmup_updates=2, decay_after=3, decay_updates=4, final_learning_rate_share=0.2)
    )
    expected = [0.05, 0.1, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02]
    np.testing.assert_allclose([float(schedule(step)) for step in range(9)], expected, rtol=1e-5)


def test_the_first_step_of_adam_is_the_warm_rate():
    optimizer = make_optimizer(config(warmup_updates=4))
    state, metrics = apply_gradients(init_state(PARAMS, optimizer), PARAMS, jnp.float32(0), optimizer)
    moved = jax.tree.map(lambda new, old: np.abs(new - old), state.params, PARAMS)
    jax.tree.map(lambda x: np.testing.assert_allclose(x, 0.025, rtol=1e-4), moved)
    assert float(metrics["skipped"]) == 0.0


@pytest.mark.parametrize(("clip", "scale"), [(1.0, 1.0 / 6.0), (10.0, 1.0)])
def test_gradients_are_clipped_by_their_global_norm(clip, scale):
    grads = {"a": np.array([4.0, -2.0], np.float32), "b": np.array([[4.0]], np.float32)}
    optimizer = make_optimizer(config(clip_norm=clip))
    state, metrics = apply_gradients(init_state(PARAMS, optimizer), grads, jnp.float32(0), optimizer)
    (moments,) = (part for part in jax.tree.leaves(state.opt_state, is_leaf=_is_adam) if _is_adam(part))
    assert float(metrics["grad_norm"]) == pytest.approx(6.0), "the norm is that before clipping"
    jax.tree.map(lambda m, g: np.testing.assert_allclose(m, 0.1 * scale * g, rtol=1e-5), moments.mu, grads)


def _is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)


def test_weight_decay_is_decoupled():
    optimizer = make_optimizer(config(weight_decay=0.5))
    zero = jax.tree.map(np.zeros_like, PARAMS)
    state, _ = apply_gradients(init_state(PARAMS, optimizer), zero, jnp.float32(0), optimizer)
    jax.tree.map(lambda new, old: np.testing.assert_allclose(new, 0.95 * old, rtol=1e-6), state.params, PARAMS)


@pytest.mark.parametrize(("bad_grad", "bad_loss"), [(np.nan, 0.0), (np.inf, 0.0), (1.0, np.nan), (1.0, -np.inf)])
def test_a_non_finite_gradient_or_loss_only_advances_the_version(bad_grad, bad_loss):
    optimizer = make_optimizer(config())
    start = init_state(PARAMS, optimizer)
    grads = {"a": np.array([1.0, bad_grad], np.float32), "b": np.array([[1.0]], np.float32)}
    state, metrics = apply_gradients(start, grads, jnp.float32(bad_loss), optimizer)
    assert float(metrics["skipped"]) == 1.0 and int(state.version) == 1
    jax.tree.map(np.testing.assert_array_equal, state._replace(version=start.version), start)


def test_the_optimiser_keeps_float32():
    state = init_state(PARAMS, make_optimizer(config()))
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(state)}
    assert kinds == {"float32", "int32"}
