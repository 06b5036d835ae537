"""Where parameters and batches lie on a mesh of (data, fsdp, tensor): one table from logical to mesh axes."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from m2po_jax.config import ConfigError, ModelConfig
from m2po_jax.models.parameters import SIZES, Parameter, leaf, size, table, tree

MESH_AXES = ("data", "fsdp", "tensor")
"""Axes of the mesh: copies of the model, parts of a copy gathered when used, parts of each matrix product."""

RULES: dict[str, str | None] = {
    "N": None,
    "D": "fsdp",
    "H": "tensor",
    "K": "tensor",
    "d": None,
    "F": "tensor",
    "V": "tensor",
}
"""Axis letter of `models.parameters` -> mesh axis that cuts it, or None."""

BATCH_AXES = ("data", "fsdp")
"""Mesh axes that cut the rows of a batch: each part of a copy computes rows of its own."""

ACTIVATION_RULES: dict[str, str | tuple[str, ...] | None] = {
    "B": BATCH_AXES,
    "T": None,
    "D": None,
    "H": "tensor",
    "K": "tensor",
    "d": None,
    "F": "tensor",
    "V": "tensor",
}
"""Axis letter of an activation, or of weights in use -> mesh axes that cut it; whole width means gathered weights."""


def shardings(config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None] = RULES) -> dict[str, Any]:
    """The sharding of every parameter, as a tree of the parameters' structure.

    A parameter of one axis is copied to every device: it is small, and what is cut would be gathered at each use.

    Raises:
        ConfigError: the mesh lacks an axis, two axes of a parameter want one mesh axis, or a mesh axis does not
            divide an axis; it names the parameter.
    """
    lacking = [axis for axis in {*rules.values()} - {None} if axis not in mesh.axis_names]
    if lacking:
        raise ConfigError(f"the mesh has axes {', '.join(mesh.axis_names)}, not {', '.join(map(str, lacking))}")
    return tree({row: NamedSharding(mesh, _spec(row, config, mesh, rules)) for row in table(config)})


def abstract_params(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """The float32 parameters as shapes with their shardings; raises ConfigError as `shardings` does."""
    where = shardings(config, mesh)
    return tree(
        {row: jax.ShapeDtypeStruct(row.shape(config), "float32", sharding=leaf(where, row)) for row in table(config)}
    )


def published(abstract: Any, config: ModelConfig) -> Any:
    """Abstract parameters in the dtypes that generators compute with: as there, but matrices in the compute dtype."""

    def as_published(row: Parameter) -> jax.ShapeDtypeStruct:
        shape = leaf(abstract, row)
        dtype = config.compute_dtype if len(row.axes.removeprefix("N")) > 1 else "float32"
        return jax.ShapeDtypeStruct(shape.shape, dtype, sharding=shape.sharding)

    return tree({row: as_published(row) for row in table(config)})


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose first axis is the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def laid_out(x: Array, axes: str) -> Array:
    """`x`, whose axes these are, laid out by `ACTIVATION_RULES` on the mesh of `jax.set_mesh`; without one, `x` itself.

    Otherwise XLA, given weights cut by fsdp, copies activations to all devices. An axis whose length the mesh does not
    divide is left to XLA.
    """
    return _constrained(x, axes, ACTIVATION_RULES)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gathered(x: Array, axes: str) -> Array:
    """A parameter with these axes laid out as weights in use; its gradient is laid out as the parameter is, by `RULES`.

    So a device adds up only the part of a gradient that it keeps, rather than all of it.
    """
    return laid_out(x, axes)


def _gathered_forward(x: Array, axes: str) -> tuple[Array, None]:
    return laid_out(x, axes), None


def _gathered_backward(axes: str, _: None, cotangent: Array) -> tuple[Array]:
    return (_constrained(cotangent, axes, RULES),)


gathered.defvjp(_gathered_forward, _gathered_backward)


def by_hand(function: Callable[..., Any], inputs: str, outputs: str) -> Callable[..., Any]:
    """`function` run by each device of the mesh of `jax.set_mesh` on its own part, with no help from XLA.

    `inputs` and `outputs` have a letter for each argument and each result: B, cut by rows; W, weights in use (V, D), of
    which a device has its rows of the vocabulary; 1, the same everywhere; S, sums over rows (V, D), of which a device
    returns those of its own rows, and gets its share of the whole, cut by fsdp too; C, the cache of a layer
    (B, K, ...), and N, that of all layers (N, B, K, ...), cut by rows and heads.
    """
    whole = PartitionSpec()
    specs = {"B": PartitionSpec(BATCH_AXES), "W": PartitionSpec("tensor"), "S": PartitionSpec("tensor", "fsdp")}
    specs |= {"C": PartitionSpec(BATCH_AXES, "tensor"), "N": PartitionSpec(None, BATCH_AXES, "tensor")}

    def local(*arguments: Any) -> tuple[Any, ...]:
        return tuple(added(x) if letter == "S" else x for letter, x in zip(outputs, function(*arguments), strict=True))

    def added(x: Array) -> Array:
        return jax.lax.psum(jax.lax.psum_scatter(x, "fsdp", scatter_dimension=1, tiled=True), "data")

    in_specs, out_specs = (tuple(specs.get(letter, whole) for letter in letters) for letters in (inputs, outputs))
    return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def divides(rows: int, vocabulary: int, width: int) -> bool:
    """Whether a mesh is set, and cuts so many rows and a table of this size (V, D) into equal parts."""
    if not _on_mesh():
        return False
    fsdp = jax.sharding.get_abstract_mesh().shape["fsdp"]
    return rows % parts("B") == 0 and vocabulary % parts("V") == 0 and width % fsdp == 0


def everywhere(tree: Any) -> Any:
    """Arrays, on all devices of the mesh of `jax.set_mesh`, so that every host can read them; without one, as given."""
    if not _on_mesh():
        return tree
    return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec()), tree)


def parts(axes: str) -> int:
    """Into how many parts the mesh of `jax.set_mesh` cuts an activation with these axes; 1 without one."""
    if not _on_mesh():
        return 1
    names = [name for letter in axes for name in _names(ACTIVATION_RULES[letter])]
    return math.prod(jax.sharding.get_abstract_mesh().shape[name] for name in names)


def _constrained(x: Array, axes: str, rules: Mapping[str, str | tuple[str, ...] | None]) -> Array:
    """`x` laid out by `rules`, where there is a mesh and it divides the axis."""
    if not _on_mesh():
        return x
    sizes = jax.sharding.get_abstract_mesh().shape
    spec = (
        rules[letter]
        if size % math.prod(sizes[name] for name in _names(rules[letter])) == 0
        else PartitionSpec.UNCONSTRAINED
        for letter, size in zip(axes, x.shape, strict=True)
    )
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _on_mesh() -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    return set(MESH_AXES) <= set(mesh.axis_names) and mesh.are_all_axes_auto


def _names(rule: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (rule,) if isinstance(rule, str) else rule or ()


def _spec(row: Parameter, config: ModelConfig, mesh: Mesh, rules: Mapping[str, str | None]) -> PartitionSpec:
    if len(row.axes.removeprefix("N")) == 1:
        return PartitionSpec()
    names = [rules[letter] for letter in row.axes]
    used = [name for name in names if name is not None]
    if len(set(used)) < len(used):
        twice = next(name for name in used if used.count(name) > 1)
        letters = " and ".join(SIZES[letter] for letter in row.axes if rules[letter] == twice)
        raise ConfigError(f"parameter {row.path}: {letters} are both cut by mesh axis {twice}")
    for letter, name in zip(row.axes, names, strict=True):
        if name is not None and size(config, letter) % mesh.shape[name]:
            raise ConfigError(
                f"parameter {row.path}: model.{SIZES[letter]} {size(config, letter)} cannot be cut into the"
                f" {mesh.shape[name]} parts of mesh axis {name}"
            )
    return PartitionSpec(*names)
