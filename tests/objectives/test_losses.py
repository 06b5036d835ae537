"""Loss, gradient and kept tokens of every objective against the reference, by hand, and by properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from m2po_jax import objectives
from tests.objectives import batches, reference

# A few settings of each: every one is compiled.
HYPERPARAMETERS = {
    "m2po": ({"threshold": 0.0}, {"threshold": 0.04}, {"threshold": 0.5}),
    "m2po_clip": ({"threshold": 0.0}, {"threshold": 0.04}, {"threshold": 0.5}),
    "grpo": ({}, {"epsilon_low": 0.0, "epsilon_high": 0.28}),
    "grpo_no_tr": ({},),
    "gspo": ({}, {"epsilon_low": 0.1, "epsilon_high": 0.2}),
}
every_objective = pytest.mark.parametrize("name", reference.NAMES)
inputs = st.tuples(batches.log_ratios(), batches.advantages(), batches.masks())


def gradient_of(objective, *arrays):
    """Loss, metrics and the gradient with respect to the policy log-probs."""
    (loss, metrics), gradient = jax.value_and_grad(objective, has_aux=True)(*arrays)
    return loss, metrics, gradient


jitted_gradient_of = jax.jit(gradient_of, static_argnums=0)
jitted_kept = jax.jit(lambda objective, *arrays: objective.kept(*arrays), static_argnums=0)
jitted_gradient_and_kept = jax.jit(
    lambda objective, *arrays: (gradient_of(objective, *arrays), objective.kept(*arrays)), static_argnums=0
)


@every_objective
@settings(max_examples=60, deadline=None)
@given(inputs, st.data())
def test_loss_gradient_and_kept_are_the_references(name, case, data):
    log_ratio, advantages, mask = case
    hyperparameters = data.draw(st.sampled_from(HYPERPARAMETERS[name]))
    batch = reference.Batch.of(log_ratio, np.zeros_like(log_ratio), advantages, mask)
    objective = objectives.get(name, **hyperparameters)
    assume(not reference.nearly_undecided(batch, hyperparameters.get("threshold", 0.04)))
    assume(not at_a_clip_boundary(objective, batch))
    arrays = (log_ratio, np.zeros_like(log_ratio), advantages, mask)
    (loss, _, gradient), kept = jitted_gradient_and_kept(objective, *arrays)
    expected_loss, expected_gradient, expected_kept = reference.objective(name, batch, **hyperparameters)
    scale = largest_term(batch)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6 * scale)
    np.testing.assert_array_equal(kept, expected_kept)


def largest_term(batch):
    ratios = [reference.ratio(x) for x in batch.log_ratio.ravel()]
    return max(ratios) * max(float(np.abs(batch.advantages).max()), 1.0)


def at_a_clip_boundary(objective, batch):
    """Whether a clip decision hangs on the last bits of the bound or of the mean log-ratio."""
    if objective.name not in ("grpo", "gspo"):
        return False
    bounds = np.log1p([-objective.config.epsilon_low, objective.config.epsilon_high])
    decided_on = slack = batch.log_ratio
    if objective.name == "gspo":
        decided_on = batch.log_ratio.sum(axis=1) / np.maximum(batch.mask.sum(axis=1), 1)
        slack = np.abs(batch.log_ratio).sum(axis=1)
    near = np.abs(decided_on[..., None] - bounds) <= 1e-6 * np.abs(slack)[..., None]
    return bool((near & (bounds != 0.0)).any())


@every_objective
@pytest.mark.parametrize("wide", [False, True])
def test_gradient_is_the_finite_difference_of_the_reference(name, wide):
    policy, behavior, advantages, mask = batches.normal_batch(3, wide=wide)
    scale = 0.002 if name == "gspo" else 1.0
    policy = behavior + scale * (policy - behavior)
    _, _, gradient = jitted_gradient_of(objectives.get(name), policy, behavior, advantages, mask)
    step, batch = 1e-5, reference.Batch.of(policy, behavior, advantages, mask)
    for token in np.ndindex(mask.shape):
        losses = []
        for sign in (1, -1):
            moved = reference.Batch.of(policy, behavior, advantages, mask)
            moved.log_ratio[token] += sign * step if mask[token] else 0.0
            losses.append(reference.objective(name, moved, decided_on=batch)[0])
        np.testing.assert_allclose(gradient[token], (losses[0] - losses[1]) / (2 * step), rtol=2e-4, atol=1e-6)


@every_objective
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name):
    """d/d log pi of -mean(A log pi): over tokens, and for gspo over responses of the mean over their tokens."""
    policy, _, advantages, mask = batches.normal_batch(5)
    loss, metrics, gradient = jitted_gradient_of(objectives.get(name), policy, policy, advantages, mask)
    weight = mask / mask.sum()
    if name == "gspo":
        weight = mask / mask.sum(axis=1, keepdims=True) / len(mask)
    np.testing.assert_allclose(gradient, -advantages * weight, rtol=1e-6)
    np.testing.assert_allclose(loss, -(advantages * weight).sum(), rtol=1e-5)
    assert metrics["masked_frac"] == 0.0 and metrics["m2_all"] == 0.0 and metrics["ratio_max"] == 1.0


@every_objective
def test_with_and_without_jit(name):
    arrays = batches.normal_batch(6)
    plain, jitted = gradient_of(objectives.get(name), *arrays), jitted_gradient_of(objectives.get(name), *arrays)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), plain, jitted)


@every_objective
def test_vmap_over_batches(name):
    stacked = [jnp.stack(x) for x in zip(*(batches.normal_batch(seed) for seed in range(3)), strict=True)]
    losses, _ = jax.jit(jax.vmap(objectives.get(name)))(*stacked)
    for i in range(3):
        expected = jitted_gradient_of(objectives.get(name), *(x[i] for x in stacked))[0]
        np.testing.assert_allclose(losses[i], expected, rtol=1e-5)


@every_objective
def test_masked_and_dropped_tokens_have_exactly_zero_gradient(name):
    policy, behavior, advantages, mask = batches.normal_batch(7)
    _, metrics, gradient = jitted_gradient_of(objectives.get(name), policy, behavior, advantages, mask)
    kept = np.asarray(jitted_kept(objectives.get(name), policy, behavior, advantages, mask))
    np.testing.assert_array_equal(np.asarray(gradient) != 0.0, kept)
    np.testing.assert_allclose(metrics["masked_frac"], (mask & ~kept).sum() / mask.sum(), rtol=1e-6)
    assert (name == "grpo_no_tr") == (not (mask & ~kept).any())


@every_objective
def test_what_the_padding_holds_does_not_matter(name):
    policy, behavior, advantages, mask = batches.normal_batch(8, wide=True)
    expected = jitted_gradient_of(objectives.get(name), policy, behavior, advantages, mask)
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        dirty = [np.where(mask, x, np.float32(junk)) for x in (policy, behavior, advantages)]
        actual = jitted_gradient_of(objectives.get(name), *dirty, mask)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


@every_objective
def test_the_gradient_reaches_the_policy_alone(name):
    policy, behavior, advantages, mask = batches.normal_batch(9)
    loss_of = lambda *arrays: objectives.get(name)(*arrays, mask)[0]  # noqa: E731
    by_behavior, by_advantages = jax.jit(jax.grad(loss_of, argnums=(1, 2)))(policy, behavior, advantages)
    assert not np.any(by_behavior) and not np.any(by_advantages)


@every_objective
def test_optional_inputs_are_taken_and_leave_these_objectives_alone(name):
    policy, behavior, advantages, mask = arrays = batches.normal_batch(10)
    optional = {
        "proximal_logprobs": policy,
        "reference_logprobs": behavior,
        "entropy": np.abs(policy),
        "staleness": np.zeros(len(mask), np.int32),
        "finish_reason": np.zeros(len(mask), np.int32),
    }
    objective = objectives.get(name)
    program = str(jax.make_jaxpr(lambda *x: objective(*x))(*arrays))
    assert str(jax.make_jaxpr(lambda *x: objective(*x, **optional))(*arrays)) == program
    for key in optional:
        with pytest.raises(TypeError, match=f"parameter '{key}'"):
            objective(*arrays, **(optional | {key: np.zeros((9, 9), np.float32)}))


@every_objective
def test_an_empty_batch_gives_zeros(name):
    policy, behavior, advantages, _ = batches.normal_batch(11)
    for nothing in (np.zeros(policy.shape, bool), None):
        arrays = (policy, behavior, advantages, nothing)
        if nothing is None:
            arrays = tuple(x[:0] for x in (policy, behavior, advantages, np.zeros(policy.shape, bool)))
        loss, metrics, gradient = jitted_gradient_of(objectives.get(name), *arrays)
        assert float(loss) == 0.0 and not np.any(gradient)
        assert all(float(value) == 0.0 for value in metrics.values()), metrics


# Hand-worked: two responses; log-ratios are logs of the ratios below; A = 2 and A = -1; the last token is padding.
RATIOS = np.asarray([[1.0, 1.5, 0.5], [0.5, 1.1, 1.0]])
ADVANTAGES = np.asarray([[2.0], [-1.0]], np.float32)
MASK = np.asarray([[True, True, True], [True, True, False]])


def hand_loss(name, **hyperparameters):
    log_ratio = np.log(RATIOS).astype(np.float32)
    objective = objectives.get(name, **hyperparameters)
    loss, _, gradient = jitted_gradient_of(objective, log_ratio, np.zeros_like(log_ratio), ADVANTAGES, MASK)
    return float(loss), np.asarray(gradient)


def test_grpo_no_tr_by_hand():
    """J = (2 * (1 + 1.5 + 0.5) - (0.5 + 1.1)) / 5 = 4.4 / 5."""
    loss, gradient = hand_loss("grpo_no_tr")
    assert loss == pytest.approx(-0.88)
    np.testing.assert_allclose(gradient, [[-0.4, -0.6, -0.2], [0.1, 0.22, 0.0]], rtol=1e-6)


def test_grpo_by_hand():
    """1.5 is clipped at 1.2, 0.5 under A < 0 at 0.8; J = (2 * (1 + 1.2 + 0.5) - (0.8 + 1.1)) / 5 = 3.5 / 5."""
    loss, gradient = hand_loss("grpo")
    assert loss == pytest.approx(-0.7)
    np.testing.assert_allclose(gradient, [[-0.4, 0.0, -0.2], [0.0, 0.22, 0.0]], rtol=1e-6)
    assert hand_loss("grpo", epsilon_high=0.6)[0] == pytest.approx(-0.82)


def test_m2po_by_hand():
    """T: 1.5 (M2 0.164) and the second 0.5 (M2 0.480), mean 0.322. At 0.3 the 0.5 goes, at 0.1 both."""
    loss, gradient = hand_loss("m2po", threshold=0.3)
    assert loss == pytest.approx(-(6.0 - 1.1) / 5)
    np.testing.assert_allclose(gradient, [[-0.4, -0.6, -0.2], [0.0, 0.22, 0.0]], rtol=1e-6)
    assert hand_loss("m2po", threshold=0.1)[0] == pytest.approx(-(3.0 - 1.1) / 5)
    assert hand_loss("m2po", threshold=0.33)[0] == pytest.approx(-0.88)


def test_m2po_clip_by_hand():
    """At 0.3: mean min(v, c) at c = 0.164 is 0.164, so c = log(1.5)^2, and 0.5 counts as 1 / 1.5."""
    loss, gradient = hand_loss("m2po_clip", threshold=0.3)
    assert loss == pytest.approx(-(6.0 - 1.1 - 1 / 1.5) / 5)
    np.testing.assert_allclose(gradient, [[-0.4, -0.6, -0.2], [0.0, 0.22, 0.0]], rtol=1e-6)
    assert hand_loss("m2po_clip", threshold=0.1)[0] == pytest.approx(-(2 * (1.0 + 1.0 + 0.5) - (1.0 + 1.1)) / 5)
    assert hand_loss("m2po_clip", threshold=0.33)[0] == pytest.approx(-0.88)


def test_gspo_by_hand():
    """s_1 = (1.5 * 0.5)^(1/3), s_2 = 0.55^(1/2), clipped below at 1 - 3e-4 since A < 0."""
    s_1 = 0.75 ** (1 / 3)
    loss, gradient = hand_loss("gspo")
    assert loss == pytest.approx(-(2 * s_1 - (1 - 3e-4)) / 2)
    np.testing.assert_allclose(gradient, [[-s_1 / 3] * 3, [0.0] * 3], rtol=1e-6)
    assert hand_loss("gspo", epsilon_low=0.5)[0] == pytest.approx(-(2 * s_1 - 0.55**0.5) / 2)


def test_no_signal_no_gradient_for_every_objective():
    policy, behavior, advantages, mask = batches.normal_batch(12)
    for name in objectives.names():
        arrays = (policy, behavior, np.zeros_like(advantages), mask)
        _, metrics, gradient = jitted_gradient_of(objectives.get(name), *arrays)
        assert not np.any(gradient) and float(metrics["no_signal_frac"]) == 1.0
