"""The programs of a run, compiled for a topology from abstract values: no weights, no devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m2po_jax.config import Config, ConfigError
from m2po_jax.generation.engine import generate
from m2po_jax.generation.sampler import slots_for
from m2po_jax.learner import state
from m2po_jax.learner.batches import packing_of
from m2po_jax.learner.packing import Packed, Packing, Size
from m2po_jax.learner.spec import update_spec
from m2po_jax.learner.state import TrainState, make_optimizer
from m2po_jax.learner.update import MiniBatch, make_update
from m2po_jax.models import Transformer, sharding
from m2po_jax.models.mesh import require_rows, row_parts
from m2po_jax.models.sharding import batch_sharding
from m2po_jax.objectives import Objective
from m2po_jax.planning.generators import abstract_published


def lower_update(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The learner's update of one mini-batch on this mesh, its state donated.

    Raises:
        ConfigError: the mesh does not divide the model's axes or the rows of a micro-batch.
    """
    model = Transformer(config.model)
    model.require_room(config.task.max_prompt_tokens + config.sampling.max_new_tokens)
    require_rows(micro_batch_rows(config), "rows of a micro-batch (learner.micro_batches)", mesh)
    spec, optimizer = update_spec(config, model), make_optimizer(config.learner)
    like, batch = abstract_state(config, mesh), abstract_batch(config, mesh, spec.objective)
    with jax.set_mesh(mesh):
        return make_update(spec, optimizer, state.shardings_of(like)).lower(like, batch)  # type: ignore[attr-defined]


def lower_generate(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """The generator's program for one work unit on this mesh: prefill, then a loop of decode steps.

    Raises:
        ConfigError: the mesh does not divide the model's axes.
    """
    prompts, samples = config.rollouts.prompts_per_unit, config.rollouts.group_size
    rows = batch_sharding(mesh)
    shape = (prompts, config.task.max_prompt_tokens)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), prompts * samples))
    params = abstract_published(config, mesh)
    with jax.set_mesh(mesh):
        return generate.lower(
            params,
            jax.ShapeDtypeStruct(shape, jnp.int32, sharding=rows),
            jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=rows),
            jax.ShapeDtypeStruct(keys.shape, keys.dtype, sharding=rows),
            jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())),
            model=Transformer(config.model),
            samples_per_prompt=samples,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=(0,),
            pad_id=0,
            slots=slots_for(config.sampling, prompts * samples, row_parts(mesh)),
        )


def decode_steps(config: Config, copies: int) -> int:
    """Steps in which the slots of that many copies of the policy decode a work unit of responses of full length."""
    responses = config.rollouts.prompts_per_unit * config.rollouts.group_size
    rounds = -(-responses // slots_for(config.sampling, responses, copies))
    return rounds * config.sampling.max_new_tokens


def micro_batch_rows(config: Config) -> int:
    """Responses whose activations are held at a time, over all devices."""
    return -(-config.mini_batch_rows // config.learner.micro_batches)


def abstract_params(config: Config, mesh: Mesh) -> Any:
    """The float32 parameters as shapes with their shardings."""
    if config.model.vocab_size is None:
        raise ConfigError("model.vocab_size is None: set it to the rows of the embedding")
    return sharding.abstract_params(config.model, mesh)


def abstract_state(config: Config, mesh: Mesh) -> TrainState:
    """The train state as shapes with their shardings."""
    return state.abstract_state(abstract_params(config, mesh), make_optimizer(config.learner))


def row_widths(config: Config) -> tuple[int, int]:
    """Tokens of a row of the update's input, and those of them whose logits are computed, at full length."""
    prompt, response = config.task.max_prompt_tokens, config.sampling.max_new_tokens
    packing = packing_of(config, prompt)
    return (prompt + response, response) if packing is None else (packing.width, _largest(packing).scored_width)


def abstract_batch(config: Config, mesh: Mesh, objective: Objective) -> MiniBatch:
    """One mini-batch whose rows are cut over the mesh, at its largest: every response of full length, a row each."""
    count, rows = config.mini_batch_rows, batch_sharding(mesh)

    def of(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((count, *shape), dtype, sharding=rows)

    prompt, response = config.task.max_prompt_tokens, config.sampling.max_new_tokens
    floats = of(jnp.float32, response)
    packing = packing_of(config, prompt, mesh.shape["data"] * mesh.shape["fsdp"])
    return MiniBatch(
        prompt_tokens=None if packing else of(jnp.int32, prompt),
        prompt_valid=None if packing else of(jnp.bool_, prompt),
        prompt_lengths=of(jnp.int32),
        response_tokens=of(jnp.int32, response),
        response_mask=of(jnp.bool_, response),
        behavior_logprobs=floats,
        rewards=of(jnp.float32),
        truncated=of(jnp.bool_),
        staleness=of(jnp.int32),
        proximal_logprobs=floats if objective.definition.proximal else None,
        reference_logprobs=floats if objective.config.kl_coefficient else None,
        packed=None if packing is None else _abstract_rows(packing, rows),
    )


def _abstract_rows(packing: Packing, where: NamedSharding) -> Packed:
    size = _largest(packing)

    def of(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)

    row = of(size.rows, packing.width)
    return Packed(row, row, of(size.rows, size.scored_width), of(packing.responses), of(packing.responses))


def _largest(packing: Packing) -> Size:
    """Of responses of full length, which fill a row each."""
    return packing.size(np.full(len(packing.scored_widths), packing.responses))


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shard = leaf.sharding.shard_shape(leaf.shape)
        count = 1
        for axis in shard:
            count *= axis
        total += count * leaf.dtype.itemsize
    return total
