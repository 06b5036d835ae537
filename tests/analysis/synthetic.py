"""Small runs with known numbers, written through m2po_jax.rollouts as the learner and the generators write them."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from m2po_jax import rollouts
from m2po_jax.config import Config, ObjectiveConfig, StalenessConfig

PROVENANCE_TOKENIZER = "tokenizer-of-the-tests"

ARMS = {
    "grpo-s0": ("grpo", 0),
    "grpo-s256": ("grpo", 256),
    "no-tr-s256": ("grpo_no_tr", 256),
    "m2po-s256": ("m2po", 256),
}


def config_of(arm: str, seed: int = 0, total_updates: int = 64, k: int | None = None) -> Config:
    """The configuration of one of ARMS."""
    objective, staleness = ARMS[arm]
    base = Config()
    return replace(
        base,
        name=arm,
        seed=seed,
        objective=ObjectiveConfig(objective),
        staleness=StalenessConfig(k=staleness if k is None else k),
        learner=replace(base.learner, total_updates=total_updates, checkpoint_every=32),
    )


def start_run(folder: Path, config: Config) -> tuple[rollouts.Store, str]:
    """An empty run directory with its configuration; returns its store and run id."""
    store = rollouts.Store.open(folder, create=True)
    return store, rollouts.create_or_resume(store, config).run_id


def update_line(version: int, **numbers: float) -> dict:
    """One update line with unremarkable numbers, except those given."""
    line = {
        "event": "update",
        "version": version,
        "behavior_version": version - version % 4,
        "staleness_updates": version % 4,
        "mini_batch": version % 4,
        "reward_mean": 0.5,
        "response_length_mean": 8.0,
        "truncated_frac": 0.0,
        "loss": -0.01,
        "masked_frac": 0.001,
        "trust_region_frac": 0.4,
        "m2_all": 0.01,
        "m2_trust_region": 0.02,
        "m2_kept": 0.015,
        "ratio_mean": 1.0,
        "ratio_max": 1.3,
        "log_ratio_min": -0.3,
        "log_ratio_max": 0.26,
        "k1": 0.0,
        "k3": 0.001,
        "ess": 0.99,
        "chi2": 0.01,
        "saturated_frac": 0.0,
        "nonfinite_tokens": 0,
        "all_masked": 0.0,
        "advantage_mean": 0.0,
        "advantage_std": 0.8,
        "no_signal_frac": 0.1,
        "grad_norm": 0.4,
        "learning_rate": 3e-5,
        "skipped": 0.0,
        "wall_time_s": 0.1 * (version + 1),
        "updates_per_s": 10.0,
    }
    return line | numbers


def evaluation_line(version: int, accuracy: float) -> dict:
    """One evaluation of 2,048 prompts."""
    error = float(np.sqrt(max(accuracy * (1 - accuracy), 0) / 2048))
    return {"event": "evaluation", "version": version, "accuracy": accuracy, "standard_error": error, "prompts": 2048}


def make_rollouts(groups: int, group_size: int, seed: int = 0, texts: list[str] | None = None) -> rollouts.Rollouts:
    """Random rollouts of `groups` prompts; `texts`, where given, are the response texts."""
    random, rows, width = np.random.default_rng(seed), groups * group_size, 9
    lengths = random.integers(3, width + 1, rows).astype(np.int32)
    inside = np.arange(width) < lengths[:, None]
    rewards = random.integers(0, 2, rows).astype(np.float32)
    return rollouts.Rollouts(
        prompt_tokens=random.integers(3, 15, (rows, 8)).astype(np.int32),
        prompt_lengths=np.full(rows, 8, np.int32),
        response_tokens=(random.integers(3, 15, (rows, width)) * inside).astype(np.int32),
        response_lengths=lengths,
        behavior_logprobs=(-random.random((rows, width)) * inside).astype(np.float32),
        rescored_logprobs=None,
        rewards=rewards,
        prompt_ids=[f"7+5+9+{row // group_size}=" for row in range(rows)],
        group_ids=np.repeat(np.arange(groups, dtype=np.int64) + 1000 * seed, group_size),
        sample_indices=np.tile(np.arange(group_size, dtype=np.int32), groups),
        finish_reasons=["stop" if reward else "length" for reward in rewards],
        response_texts=texts or [f"12,21,{20 + row}" for row in range(rows)],
        gold_answers=[str(21 + row // group_size) for row in range(rows)],
        temperature=1.0,
        top_p=1.0,
    )


def write_shard(
    store: rollouts.Store, run_id: str, unit: rollouts.UnitId, data: rollouts.Rollouts, weights_digest: str = "w"
) -> tuple[str, str]:
    """Write one shard as a generator does; returns its path and content digest."""
    provenance = rollouts.Provenance(run_id, weights_digest, PROVENANCE_TOKENIZER)
    encoded = rollouts.encode(data, unit, provenance, "tests")
    path = rollouts.shard_path(unit)
    assert store.create(path, encoded)
    return path, rollouts.decode(encoded, path).digest


def diagnostics(version: int, staleness: int, tokens: int, spread: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Columns of one diagnostics sample whose log-ratios are normal with the given standard deviation."""
    random = np.random.default_rng(seed + version)
    log_ratio = random.normal(0.0, spread, tokens).astype(np.float32)
    behavior = -random.random(tokens).astype(np.float32)
    return {
        "version": np.full(tokens, version, np.int64),
        "behavior_version": np.full(tokens, version - staleness, np.int64),
        "staleness_updates": np.full(tokens, staleness, np.int64),
        "group_id": np.arange(tokens, dtype=np.int64) // 72,
        "sample_index": (np.arange(tokens) // 9 % 8).astype(np.int32),
        "position": (np.arange(tokens) % 9).astype(np.int32),
        "token_id": random.integers(3, 15, tokens).astype(np.int32),
        "token_text": np.array(["7"] * tokens),
        "policy_logprob": behavior + log_ratio,
        "behavior_logprob": behavior,
        "log_ratio": log_ratio,
        "advantage": np.where(random.random(tokens) < 0.5, 1.0, -1.0).astype(np.float32),
        "entropy": random.random(tokens).astype(np.float32),
        "kept": np.abs(log_ratio) < 0.5,
    }


def make_run(folder: Path, arm: str, seed: int = 0, gain: float = 0.3, updates: int = 64) -> rollouts.Store:
    """A run whose accuracy rises by `gain` over 64 updates, stopped after `updates`, with shards and diagnostics."""
    store, run_id = start_run(folder, config_of(arm, seed, k=32 if "s256" in arm else 0))
    lines = [update_line(n, reward_mean=0.3 + gain * n / 64) for n in range(updates)]
    lines += [evaluation_line(n, 0.3 + gain * n / 64) for n in range(0, updates + 1, 16)]
    rollouts.write_segment(store, 0, lines)
    for version in range(0, updates, 32):
        rollouts.write_diagnostics(store, version, diagnostics(version, version % 5, 200, 0.1, seed))
    for version in (0, 4, 8):
        for unit in (0, 1):
            write_shard(store, run_id, rollouts.UnitId(version, 0, unit), make_rollouts(3, 4, version))
    return store
