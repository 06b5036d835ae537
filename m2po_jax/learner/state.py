"""The train state, one frozen pytree, and the optimiser that advances it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from m2po_jax.config import LearnerConfig


class TrainState(NamedTuple):
    """Everything an update changes. Version n is the policy after n updates."""

    version: Array
    """int32 scalar: model updates so far, skipped ones included."""
    params: Any
    """float32 parameters."""
    opt_state: Any
    """Optimiser state, float32."""


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip, with linear warm-up and decay."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config),
            b1=config.adam_b1,
            b2=config.adam_b2,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
        ),
    )


def learning_rate_schedule(config: LearnerConfig) -> optax.Schedule:
    """Learning rate by applied updates: linear warm-up, the first at peak / warmup_updates; constant; linear decay."""
    peak, warmup, decay = config.learning_rate, config.warmup_updates, config.decay_updates
    ramp = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    if decay is None:
        return optax.join_schedules([ramp, optax.constant_schedule(peak)], [warmup])
    fall = optax.linear_schedule(peak, peak * config.final_learning_rate_share, decay)
    constant = max(config.decay_after, warmup)
    return optax.join_schedules([ramp, optax.constant_schedule(peak), fall], [warmup, constant])


def abstract_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state as shapes with shardings: what the optimiser keeps of a parameter lies where the parameter lies.

    `params` are arrays or shapes with shardings; the rest of the state is on all of their devices.
    """
    where = jax.tree.leaves(params)[0].sharding
    everywhere = NamedSharding(where.mesh, PartitionSpec()) if isinstance(where, NamedSharding) else where
    opt_state = optax.tree_map_params(
        optimizer,
        lambda shape, param: _at(shape, param.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda shape: _at(shape, everywhere),
    )
    version: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(version, jax.tree.map(lambda x: _at(x, x.sharding), params), opt_state)


def shardings_of(tree: Any) -> Any:
    """Where each array or shape of a tree lies."""
    return jax.tree.map(lambda x: x.sharding, tree)


def init_state(params: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """Version 0 with a fresh optimiser; `params` is copied, since updates donate the state.

    On a mesh the optimiser's state is laid out as the parameters are. Elsewhere nothing is bound to a device, so that
    the first update is compiled as the later ones are.
    """
    params = jax.tree.map(jnp.array, params)
    if not isinstance(jax.tree.leaves(params)[0].sharding, NamedSharding):
        return TrainState(jnp.int32(0), params, optimizer.init(params))
    like = abstract_state(params, optimizer)
    opt_state = jax.jit(optimizer.init, out_shardings=shardings_of(like.opt_state))(params)
    return TrainState(jax.device_put(jnp.int32(0), like.version.sharding), params, opt_state)


def _at(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def apply_gradients(
    state: TrainState, grads: Any, loss: Array, optimizer: optax.GradientTransformation
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step; a non-finite loss or gradient leaves parameters and optimiser alone but counts as an update.

    Returns the next state, and metrics `grad_norm` (before clipping) and `skipped` (1.0 or 0.0), float32 scalars.
    """
    grad_norm = optax.tree.norm(grads)
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    choose = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)  # noqa: E731
    state = TrainState(state.version + 1, choose(params, state.params), choose(opt_state, state.opt_state))
    return state, {"grad_norm": grad_norm, "skipped": 1.0 - finite.astype(jnp.float32)}
