"""Loss, gradient and kept tokens of every objective against the reference, by hand, and by properties."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from m2po_jax import objectives
from tests.objectives import batches, reference
from tests.objectives.batches import full_batch, jitted_outcome, metrics_of, without_measurements

SEQUENCE = {"aggregation": "sequence_mean"}
TOKEN = {"aggregation": "token_mean"}
CONSTANT = {"aggregation": "constant_sum", "length_constant": 4.0}
K1, K2, K3 = ({"kl_coefficient": 0.1, "kl_estimator": estimator} for estimator in ("k1", "k2", "k3"))
# The defaults; something else with (B, T) advantages; something else with a KL penalty. Every one is compiled.
SETTINGS = {
    "m2po": ({}, {"threshold": 0.5}, {"threshold": 0.0} | SEQUENCE | K1),
    "m2po_clip": ({}, {"threshold": 0.0}, {"threshold": 0.5} | CONSTANT | K2),
    "m2po_all_tokens": ({}, {"threshold": 0.5, "denominator": "kept"} | K1, {"threshold": 0.2} | SEQUENCE | K3),
    "grpo": ({}, {"epsilon_low": 0.0, "epsilon_high": 0.28} | CONSTANT, SEQUENCE | K1),
    "grpo_no_tr": ({}, SEQUENCE, CONSTANT | K3),
    "gspo": ({}, {"epsilon_high": 0.3} | TOKEN, {"epsilon_low": 0.1, "epsilon_high": 0.2} | CONSTANT | K2),
    "dapo": ({}, {"overlong_filter": False} | CONSTANT, SEQUENCE | K3),
    "dr_grpo": ({}, TOKEN | {"epsilon_high": 0.5}, SEQUENCE | K1),
    "cispo": ({}, SEQUENCE, {"epsilon_low": 0.2, "epsilon_high": 0.3} | CONSTANT | K2),
    "decoupled_ppo": ({}, {"epsilon_low": 0.5} | SEQUENCE, CONSTANT | K3),
    "tis": ({}, {"cap": 1.2} | CONSTANT, SEQUENCE | K2),
    "icepop": ({}, CONSTANT, {"weight_low": 0.8, "weight_high": 1.3} | SEQUENCE | K1),
    "sapo": ({}, {"tau_positive": 2.0} | TOKEN, {"tau_negative": 0.5} | CONSTANT | K3),
    "topr": ({}, {"cap": 0.7} | SEQUENCE, {"cap": 3.0} | CONSTANT | K2),
    "gmpo": ({}, {"clip_low": 0.0, "clip_high": 0.1} | TOKEN, {"clip_high": 1.0} | CONSTANT | K1),
}
CORE = ("m2po", "grpo", "gspo", "decoupled_ppo")
"""Objectives whose tests are in the fast tier; `make test` runs those of all."""
every_objective = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in reference.NAMES]
)


@every_objective
@pytest.mark.parametrize("setting", range(3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.data())
def test_loss_gradient_and_kept_are_the_references(name, setting, data):
    arguments, changed = data.draw(batches.batches(wide=setting == 1)), SETTINGS[name][setting]
    batch = reference.Batch.of(**arguments)
    assume(not hangs_on_rounding(name, batch, reference.settings(name, **changed)))
    agree(jitted_outcome(objectives.get(name, **changed), arguments), name, batch, **changed)


def agree(actual, name, batch, **changed):
    """Outcome and reference: equal decisions, numbers equal but for the rounding of what they are the sum of.

    No gradient reaches anything but the policy.
    """
    assert not any(np.any(x) for x in jax.tree.leaves(actual.by_others))
    expected, relative = reference.objective(name, batch, **changed), rounding(name, batch)
    np.testing.assert_array_equal(actual.kept, expected.kept)
    assert np.isfinite(actual.loss) and np.isfinite(actual.gradient).all()
    assert abs(float(actual.loss) - expected.loss) <= relative * expected.loss_size + 1e-30
    excess = np.abs(np.asarray(actual.gradient, np.float64) - expected.gradient) - relative * expected.gradient_size
    assert (excess <= 1e-30).all(), (actual.gradient, expected.gradient)


def rounding(name, batch):
    """Relative error of float32 arithmetic; the exponent of a whole response has an absolute one."""
    totals = np.abs(batch.log_ratio).sum(axis=1)
    if name in ("gspo", "gmpo"):
        totals = totals / np.maximum(batch.lengths(), 1)
    return 5e-6 + (3e-7 * totals.max() if name in ("gspo", "gmpo", "topr") else 0.0)


def hangs_on_rounding(name, batch, s):
    """Whether a decision hangs on the last bits of a bound, or of the mean of a response."""
    return any(
        bound != 0.0 and abs(value - bound) <= 1e-6 * max(abs(bound), slack)
        for values, slacks, bounds in decisions(name, batch, s)
        for value, slack in zip(values.ravel(), slacks.ravel(), strict=True)
        for bound in bounds
    )


def decisions(name, batch, s):
    """(values, their slack, bounds that they are compared with) of each rule of an objective."""
    if name == "gmpo":
        yield batch.log_ratio, np.zeros(batch.mask.shape), (-s.clip_low, s.clip_high)
    elif name == "gspo":
        means, sizes = (x.sum(axis=1) / np.maximum(batch.lengths(), 1) for x in (batch.log_ratio, abs(batch.log_ratio)))
        yield means, sizes, (math.log1p(-s.epsilon_low), math.log1p(s.epsilon_high), -20.0, 20.0)
    elif hasattr(s, "epsilon_high") and name != "cispo":
        bounds = (math.log1p(-s.epsilon_low), math.log1p(s.epsilon_high))
        decided_on = batch.log_ratio if name in ("grpo", "dapo", "dr_grpo") else batch.proximal_log_ratio
        yield decided_on, np.zeros(batch.mask.shape), bounds
    if name == "icepop":
        yield batch.log_weight, np.zeros(batch.mask.shape), (math.log(s.weight_low), math.log(s.weight_high))


@every_objective
@pytest.mark.parametrize("setting", range(3))
def test_gradient_is_the_finite_difference_of_the_references_loss(name, setting):
    """The reference's gradient is a formula; this one is not."""
    changed, step = SETTINGS[name][setting], 1e-5
    arguments = full_batch(3, spread=0.002 if name == "gspo" else 0.3, wide=setting == 1)
    batch = reference.Batch.of(**arguments)
    gradient = jitted_outcome(objectives.get(name, **changed), without_measurements(arguments)).gradient
    for token in np.ndindex(batch.mask.shape):
        losses = [0.0, 0.0]
        if batch.usable[token]:
            moved = (batch.moved(token, sign * step) for sign in (1, -1))
            losses = [reference.objective(name, x, decided_on=batch, **changed).loss for x in moved]
        np.testing.assert_allclose(gradient[token], (losses[0] - losses[1]) / (2 * step), rtol=2e-4, atol=1e-6)


# Hand-worked: two responses; log-ratios are logs of the ratios below, behaviour log-probs are 0; A = 2 and A = -1. The
# ratios of the proximal to the behaviour policy are WEIGHTS; policy over proximal is [1/3, 1.5, 2], [0.5, 2.75].
RATIOS = np.asarray([[1.0, 1.5, 0.5], [0.5, 1.1, 1.0]])
WEIGHTS = np.asarray([[3.0, 1.0, 0.25], [1.0, 0.4, 1.0]])


def by_hand(name, finish_reason=(0, 0), **hyperparameters):
    """J and the gradient of J, (2, 3); the last token is padding, and so is what is left of SHAPE."""
    batch = without_measurements(batches.of_log_ratios(np.log(RATIOS[0]), np.log(RATIOS[1, :2])))
    batch["proximal_logprobs"] = np.zeros(batches.SHAPE, np.float32)
    batch["proximal_logprobs"][:2, :3] = np.log(WEIGHTS)
    batch["advantages"] = np.asarray([[2.0], [-1.0], [0.0], [0.0]], np.float32)
    batch["finish_reason"][:2] = finish_reason
    outcome = jitted_outcome(objectives.get(name, **hyperparameters), batch)
    outside = ~batch["response_mask"]
    assert not np.asarray(outcome.kept)[outside].any() and not np.asarray(outcome.gradient)[outside].any()
    return -float(outcome.loss), -np.asarray(outcome.gradient)[:2, :3]


def is_close(actual, gain, gradient=None):
    assert actual[0] == pytest.approx(gain, rel=1e-5)
    if gradient is not None:
        np.testing.assert_allclose(actual[1], gradient, rtol=1e-5, atol=1e-8)


def test_grpo_no_tr_by_hand():
    """J = (2 * (1 + 1.5 + 0.5) - (0.5 + 1.1)) / 5 = 4.4 / 5."""
    is_close(by_hand("grpo_no_tr"), 0.88, [[0.4, 0.6, 0.2], [-0.1, -0.22, 0.0]])


def test_grpo_by_hand():
    """1.5 is clipped at 1.2, 0.5 under A < 0 at 0.8; J = (2 * (1 + 1.2 + 0.5) - (0.8 + 1.1)) / 5 = 3.5 / 5."""
    is_close(by_hand("grpo"), 0.7, [[0.4, 0.0, 0.2], [0.0, -0.22, 0.0]])
    is_close(by_hand("grpo", epsilon_high=0.6), 0.82)


def test_dapo_by_hand():
    """Clipped at 1.28: J = (2 * (1 + 1.28 + 0.5) - (0.8 + 1.1)) / 5; without a cut response, still over 5 tokens."""
    is_close(by_hand("dapo"), (5.56 - 1.9) / 5, [[0.4, 0.0, 0.2], [0.0, -0.22, 0.0]])
    is_close(by_hand("dapo", finish_reason=(0, 1)), 5.56 / 5, [[0.4, 0.0, 0.2], [0.0, 0.0, 0.0]])
    is_close(by_hand("dapo", finish_reason=(1, 1)), 0.0, np.zeros((2, 3)))
    is_close(by_hand("dapo", finish_reason=(1, 1), overlong_filter=False), (5.56 - 1.9) / 5)


def test_dr_grpo_by_hand():
    """GRPO's sums over responses times constant: J = (5.4 - 1.9) / 2 with a constant of 1, / 8 with one of 4."""
    is_close(by_hand("dr_grpo"), 1.75, [[1.0, 0.0, 0.5], [0.0, -0.55, 0.0]])
    is_close(by_hand("dr_grpo", length_constant=4.0), 3.5 / 8, [[0.25, 0.0, 0.125], [0.0, -1.1 / 8, 0.0]])


def test_m2po_by_hand():
    """T: 1.5 (M2 0.164) and the second 0.5 (M2 0.480), mean 0.322. At 0.3 the 0.5 goes, at 0.1 both."""
    is_close(by_hand("m2po", threshold=0.3), (6.0 - 1.1) / 5, [[0.4, 0.6, 0.2], [0.0, -0.22, 0.0]])
    is_close(by_hand("m2po", threshold=0.1), (3.0 - 1.1) / 5)


def test_m2po_clip_by_hand():
    """At 0.3: mean min(v, c) at c = 0.164 is 0.164, so c = log(1.5)^2, and 0.5 counts as 1 / 1.5."""
    is_close(by_hand("m2po_clip", threshold=0.3), (6.0 - 1.1 - 1 / 1.5) / 5, [[0.4, 0.6, 0.2], [0.0, -0.22, 0.0]])
    is_close(by_hand("m2po_clip", threshold=0.1), (2 * (1.0 + 1.0 + 0.5) - (1.0 + 1.1)) / 5)


def test_m2po_all_tokens_by_hand():
    """M2 of the weights: log(3)^2 = 1.207, 0, log(4)^2 = 1.922, 0, log(2.5)^2 = 0.840; their mean is 0.794.

    At 0.5 the 1.922 goes, the mean is 0.512, so that the 1.207 goes too, the mean is 0.280; at 0 the zeros stay. The
    ratios to the proximal policy count as 1/3, 1.2, 1.2, 0.8, 2.75 after the clip.
    """
    kept_three = [[0.0, 0.0, 0.0], [0.0, -0.22, 0.0]]
    is_close(by_hand("m2po_all_tokens", threshold=0.5), (2.4 - 0.8 - 1.1) / 5, kept_three)
    is_close(by_hand("m2po_all_tokens", threshold=0.0), (2.4 - 0.8) / 5)
    of_three = by_hand("m2po_all_tokens", threshold=0.5, denominator="kept")
    is_close(of_three, (2.4 - 0.8 - 1.1) / 3, [[0.0, 0.0, 0.0], [0.0, -1.1 / 3, 0.0]])


def test_decoupled_ppo_by_hand():
    """3 * 1/3 * 2 + 1 * 1.2 * 2 + 0.25 * 1.2 * 2 - 1 * 0.8 - 0.4 * 2.75 = 2 + 2.4 + 0.6 - 0.8 - 1.1."""
    is_close(by_hand("decoupled_ppo"), 3.1 / 5, [[0.4, 0.0, 0.0], [0.0, -0.22, 0.0]])


def test_tis_by_hand():
    """The weight 3 counts as 2: 4/3 in place of 2."""
    is_close(by_hand("tis"), (3.1 - 2 / 3) / 5, [[4 / 15, 0.0, 0.0], [0.0, -0.22, 0.0]])
    is_close(by_hand("tis", cap=4.0), 3.1 / 5)


def test_icepop_by_hand():
    """The weights 0.25 and 0.4 lie below 0.5, so that 0.6 and -1.1 go; 3 lies below 5, but above 2."""
    is_close(by_hand("icepop"), (2.0 + 2.4 - 0.8) / 5, [[0.4, 0.0, 0.0], [0.0, 0.0, 0.0]])
    is_close(by_hand("icepop", weight_high=2.0), (2.4 - 0.8) / 5)


def test_cispo_by_hand():
    """J = sum of r A log pi / 5 with r constant, log pi = log r here; with ranges of 0.2 r is 1, 1.2, 0.8, 0.8, 1.1."""
    logs = np.log(RATIOS)
    gain = (2 * (RATIOS[0] * logs[0]).sum() - (RATIOS[1] * logs[1]).sum()) / 5
    is_close(by_hand("cispo"), gain, [[0.4, 0.6, 0.2], [-0.1, -0.22, 0.0]])
    narrow = by_hand("cispo", epsilon_low=0.2, epsilon_high=0.2)
    np.testing.assert_allclose(narrow[1], [[0.4, 0.48, 0.32], [-0.16, -0.22, 0.0]], rtol=1e-5)


def test_topr_by_hand():
    """w_1 = 1 as A > 0; w_2 = 0.5 * 1.1 = 0.55, or the cap: J = (2 log 0.75 - 0.55 log 0.55) / 5."""
    gain = (2 * math.log(0.75) - 0.55 * math.log(0.55)) / 5
    is_close(by_hand("topr"), gain, [[0.4, 0.4, 0.4], [-0.11, -0.11, 0.0]])
    np.testing.assert_allclose(by_hand("topr", cap=0.5)[1], [[0.4, 0.4, 0.4], [-0.1, -0.1, 0.0]], rtol=1e-5)


def test_sapo_by_hand():
    """J_1 = 2 / 3 * 4 * (s(0) + s(0.5) + s(-0.5)) = 4 since s(x) + s(-x) = 1; at tau = 2 and A < 0
    J_2 = -1/2 * 2 * (s(-1) + s(0.2)) = -(0.268941 + 0.549834). The slope of a token is 4 s (1 - s) r A.
    """
    positive = [2 / 6 * 4 * s * (1 - s) * r for s, r in zip((0.5, 0.622459, 0.377541), RATIOS[0], strict=True)]
    negative = [-1 / 4 * 4 * s * (1 - s) * r for s, r in zip((0.268941, 0.549834), RATIOS[1, :2], strict=True)]
    is_close(by_hand("sapo", tau_negative=2.0), (4 - 0.818775) / 2, [positive, [*negative, 0.0]])


def test_gspo_by_hand():
    """s_1 = (1.5 * 0.5)^(1/3), s_2 = 0.55^(1/2), clipped below at 1 - 3e-4 since A < 0."""
    s_1 = 0.75 ** (1 / 3)
    is_close(by_hand("gspo"), (2 * s_1 - (1 - 3e-4)) / 2, [[s_1 / 3] * 3, [0.0] * 3])
    is_close(by_hand("gspo", epsilon_low=0.5), (2 * s_1 - 0.55**0.5) / 2)


def test_gmpo_by_hand():
    """Ratios clipped at exp(0.4), exp(-0.4): g_1 = (exp(0.4) * 0.5)^(1/3), g_2 = (exp(-0.4) * 1.1)^(1/2)."""
    g_1, g_2 = (math.exp(0.4) * 0.5) ** (1 / 3), (math.exp(-0.4) * 1.1) ** (1 / 2)
    is_close(by_hand("gmpo"), (2 * g_1 - g_2) / 2, [[g_1 / 3, 0.0, g_1 / 3], [0.0, -g_2 / 4, 0.0]])


@every_objective
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name):
    """d/d log pi of -sum of weight A log pi: 1 / 5, 1 / (2 |o_i|) or 1 / 2 for each token by aggregation."""
    batch = without_measurements(batches.of_log_ratios([0.0] * 3, [0.0] * 2))
    batch["advantages"] = np.asarray([[2.0], [-1.0], [0.0], [0.0]], np.float32)
    for policy in batches.LOGPROBS:
        batch[policy] = np.full(batches.SHAPE, -1.5, np.float32)
    weights = {"token_mean": (1 / 5, 1 / 5), "sequence_mean": (1 / 6, 1 / 4), "constant_sum": (1 / 2, 1 / 2)}
    objective = objectives.get(name)
    first, second = weights[objective.config.aggregation]
    loss, gradient, kept, _ = jitted_outcome(objective, batch)
    expected = np.zeros(batches.SHAPE)
    expected[0, :3], expected[1, :2] = -2.0 * first, second
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    np.testing.assert_array_equal(kept, batch["response_mask"])
    # What a token adds to J at r = 1 and A = 1: r, log pi, or the gate 2 / tau.
    good, bad = {"cispo": (-1.5, -1.5), "topr": (-1.5, -1.5), "sapo": (2.0, 2.0 / 1.05)}.get(name, (1.0, 1.0))
    np.testing.assert_allclose(loss, -2.0 * good * 3 * first + bad * 2 * second, rtol=1e-6)


@every_objective
def test_the_public_call_with_and_without_jit_is_its_pieces(name):
    batch = full_batch(6)
    objective, arguments = objectives.get(name), without_measurements(batch)
    expected = jitted_outcome(objective, arguments)
    expected_metrics = metrics_of(batch, expected.kept, expected.loss)

    def call(policy):
        return objective(**(batch | {"policy_logprobs": policy}))

    (loss, metrics), gradient = jax.value_and_grad(call, has_aux=True)(batch["policy_logprobs"])
    np.testing.assert_allclose(loss, expected.loss, rtol=1e-5)
    np.testing.assert_allclose(gradient, expected.gradient, rtol=1e-5, atol=1e-8)
    unused = set() if objective.definition.proximal else {"nonfinite_proximal"}
    assert metrics.keys() == expected_metrics.keys() - unused - {"nonfinite_reference", "reference_kl"}
    for key, value in metrics.items():
        np.testing.assert_allclose(value, expected_metrics[key], rtol=1e-5, atol=1e-7, err_msg=key)
    np.testing.assert_array_equal(objective.kept(**arguments), expected.kept)


@every_objective
def test_vmap_over_batches(name):
    singles = [without_measurements(full_batch(seed)) for seed in range(3)]
    stacked = {key: jnp.stack([batch[key] for batch in singles]) for key in singles[0]}
    objective = objectives.get(name)

    def loss_and_share(batch):
        loss, metrics = objective(**batch)
        return loss, metrics["masked_frac"]

    losses, shares = jax.jit(jax.vmap(loss_and_share))(stacked)
    for i, batch in enumerate(singles):
        loss, _, kept, _ = jitted_outcome(objective, batch)
        np.testing.assert_allclose(losses[i], loss, rtol=1e-5)
        count = batch["response_mask"].sum()
        np.testing.assert_allclose(shares[i], (count - np.sum(kept)) / count, rtol=1e-6)


def masking_batch():
    """One in which every rule that can drop tokens does, and none drops all."""
    batch = full_batch(7)
    batch["proximal_logprobs"] = batch["behavior_logprobs"] + 2.5 * (
        batch["proximal_logprobs"] - batch["behavior_logprobs"]
    )
    return without_measurements(batch)


@every_objective
def test_masked_and_dropped_tokens_have_exactly_zero_gradient(name):
    batch = masking_batch()
    _, gradient, kept, _ = jitted_outcome(objectives.get(name), batch)
    np.testing.assert_array_equal(np.asarray(gradient) != 0.0, kept)
    dropped = batch["response_mask"] & ~np.asarray(kept)
    assert kept.any() and (name in ("grpo_no_tr", "cispo", "sapo", "topr")) == (not dropped.any())


@every_objective
def test_what_the_padding_holds_changes_no_bit(name):
    batch = without_measurements(full_batch(8))
    batch["response_mask"][2] = False
    expected = jitted_outcome(objectives.get(name), batch)
    for junk in (np.nan, np.inf, -np.inf, 1e30):
        dirty = {key: np.where(batch["response_mask"], batch[key], np.float32(junk)) for key in batches.LOGPROBS}
        dirty["advantages"] = np.where(batch["response_mask"].any(axis=1, keepdims=True), batch["advantages"], junk)
        dirty["advantages"] = dirty["advantages"].astype(np.float32)
        actual = jitted_outcome(objectives.get(name), batch | dirty)
        jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_junk_advantages_of_single_padding_tokens_change_no_bit():
    batch = without_measurements(full_batch(8, wide=True))
    dirty = batch | {"advantages": np.where(batch["response_mask"], batch["advantages"], np.float32(np.nan))}
    for name in ("m2po", "gspo", "gmpo", "topr"):
        jax.tree.map(
            np.testing.assert_array_equal,
            *(jitted_outcome(objectives.get(name, **SETTINGS[name][1]), x) for x in (dirty, batch)),
        )


@every_objective
@pytest.mark.parametrize("setting", [0, 2])
def test_the_gradient_reaches_the_policy_alone(name, setting):
    outcome = jitted_outcome(objectives.get(name, **SETTINGS[name][setting]), without_measurements(full_batch(9)))
    assert np.any(outcome.gradient)
    others = {"behavior_logprobs", "proximal_logprobs", "reference_logprobs", "advantages"}
    assert outcome.by_others.keys() == others and not any(np.any(x) for x in outcome.by_others.values())


USED = {"dapo": "finish_reason"} | dict.fromkeys(
    ("m2po_all_tokens", "decoupled_ppo", "tis", "icepop"), "proximal_logprobs"
)


@every_objective
def test_optional_inputs_that_an_objective_does_not_use_change_no_bit(name):
    batch = without_measurements(full_batch(10))
    others = {
        "proximal_logprobs": batch["proximal_logprobs"] - 2.0,
        "reference_logprobs": batch["reference_logprobs"] - 2.0,
        "finish_reason": 1 - batch["finish_reason"],
    }
    objective = objectives.get(name)
    expected = jitted_outcome(objective, batch)
    for key, other in others.items():
        actual = jitted_outcome(objective, batch | {key: other})
        if key == USED.get(name):
            assert float(actual.loss) != float(expected.loss)
        else:
            jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("name", ["m2po", "grpo", "topr"])
def test_optional_inputs_that_are_not_used_may_be_left_out(name):
    batch = without_measurements(full_batch(10))
    given = jitted_outcome(objectives.get(name), batch)
    needed = ("policy_logprobs", "behavior_logprobs", "advantages", "response_mask")
    left_out = jitted_outcome(objectives.get(name), {key: batch[key] for key in needed})
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), left_out[:3], given[:3])


@pytest.mark.parametrize("name", ["m2po_all_tokens", "decoupled_ppo", "tis", "icepop"])
def test_without_a_proximal_policy_it_is_the_behavior_policy_and_the_loss_that_of_grpo(name):
    batch = without_measurements(full_batch(11, spread=0.5))
    alone = {key: x for key, x in batch.items() if key != "proximal_logprobs"}
    expected = jitted_outcome(objectives.get("grpo"), alone)
    for arguments in (alone, batch | {"proximal_logprobs": batch["behavior_logprobs"]}):
        actual = jitted_outcome(objectives.get(name), arguments)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), actual[:3], expected[:3])
    assert not np.array_equal(expected.kept, batch["response_mask"])


WRONG = {
    "policy_logprobs": [np.zeros((4, 6), np.int32), np.zeros((4, 6), bool), np.zeros((4,), np.float32)],
    "behavior_logprobs": [np.zeros((4, 5), np.float32), np.zeros((4, 6), np.int32), np.zeros((4,), np.float32)],
    "advantages": [np.zeros((4, 2), np.float32), np.zeros((4,), np.float32), np.zeros((4, 1), np.int32)],
    "response_mask": [np.ones((4, 5), bool), np.ones((4, 6), np.int32), np.ones((4,), bool)],
    "proximal_logprobs": [np.zeros((4, 5), np.float32), np.zeros((4, 6), np.int32), np.zeros((4, 1), np.float32)],
    "reference_logprobs": [np.zeros((3, 6), np.float32), np.zeros((4, 6), np.int32)],
    "entropy": [np.zeros((4, 1), np.float32), np.zeros((4, 6), np.int32)],
    "staleness": [np.zeros((4, 1), np.int32), np.zeros((4,), np.float32), np.zeros((3,), np.int32)],
    "finish_reason": [np.zeros((4, 6), np.int32), np.zeros((4,), np.float32), np.zeros((3,), bool)],
}


@pytest.mark.parametrize(("argument", "value"), [(name, x) for name, values in WRONG.items() for x in values])
def test_wrong_shapes_and_dtypes_are_refused_by_name(argument, value):
    batch = full_batch(0) | {argument: value}
    objective = objectives.get("m2po")
    with pytest.raises(TypeError, match=f"parameter '{argument}'"):
        jax.eval_shape(lambda: objective(**batch))
    if argument not in ("entropy", "staleness"):
        with pytest.raises(TypeError, match=f"parameter '{argument}'"):
            jax.eval_shape(lambda: objective.kept(**without_measurements(batch)))


def test_policy_logprobs_of_another_shape_are_refused_too():
    batch = full_batch(0) | {"policy_logprobs": np.zeros((4, 5), np.float32)}
    with pytest.raises(TypeError, match="parameter 'behavior_logprobs'"):
        jax.eval_shape(lambda: objectives.get("m2po")(**batch))


@every_objective
def test_a_kl_penalty_without_reference_log_probs_is_refused_by_name(name):
    batch = {key: x for key, x in full_batch(0).items() if key != "reference_logprobs"}
    with pytest.raises(ValueError, match=f"objective {name} has kl_coefficient 0.5, .*reference_logprobs"):
        jax.eval_shape(lambda: objectives.get(name, kl_coefficient=0.5)(**batch))
    jax.eval_shape(lambda: objectives.get(name)(**batch))


@every_objective
def test_an_empty_batch_gives_zeros(name):
    """Everything masked; every row of a batch empty but one; no rows at all."""
    objective, batch = objectives.get(name), without_measurements(full_batch(11))
    nothing = batch | {"response_mask": np.zeros(batches.SHAPE, bool)}
    no_rows = {key: x[:0] for key, x in batch.items()}
    for arguments in (nothing, no_rows):
        loss, gradient, kept, _ = jitted_outcome(objective, arguments)
        assert float(loss) == 0.0 and not np.any(gradient) and not np.any(kept)
        assert gradient.shape == arguments["policy_logprobs"].shape


@every_objective
def test_a_fully_masked_row_is_no_response(name):
    """Three empty responses beside one are as nothing: weights count one response."""
    batch = without_measurements(full_batch(12))
    batch["response_mask"][1:] = False
    batch["finish_reason"][:] = 0
    actual = jitted_outcome(objectives.get(name), batch)
    assert float(actual.loss) != 0.0 and not np.any(actual.gradient[1:])
    agree(actual, name, reference.Batch.of(**batch))


@every_objective
def test_equal_rewards_give_exactly_nothing(name):
    batch = without_measurements(full_batch(12))
    batch["advantages"] = np.asarray(objectives.group_advantages(np.full(4, 0.1, np.float32), group_size=4))[:, None]
    loss, gradient, *_ = jitted_outcome(objectives.get(name), batch)
    assert float(loss) == 0.0 and not np.any(gradient)


@every_objective
def test_a_missing_log_prob_drops_the_token_where_it_is_used_alone(name):
    """Of the reference with a KL penalty, of the proximal policy for the objectives that have one."""
    batch = without_measurements(full_batch(13))
    batch["response_mask"][:] = True
    wide = {"epsilon_low": 0.9, "epsilon_high": 9.0} if name == "gspo" else {}
    whole = np.asarray(objectives.get(name, **wide).kept(**batch))
    assert whole.any()
    for policy, uses in (("reference", {"kl_coefficient": 0.1}), ("proximal", {})):
        broken = batch | {f"{policy}_logprobs": batch[f"{policy}_logprobs"].copy()}
        token = tuple(np.argwhere(whole)[0])
        broken[f"{policy}_logprobs"][token] = np.nan
        used = bool(uses) or objectives.get(name).definition.proximal
        assert objectives.get(name, **uses, **wide).kept(**broken)[token] == (not used)
        _, metrics = objectives.get(name, **uses, **wide)(**broken)
        assert metrics["nonfinite_tokens"] == float(used)
        if policy == "reference":
            np.testing.assert_array_equal(objectives.get(name, **wide).kept(**broken), whole)
