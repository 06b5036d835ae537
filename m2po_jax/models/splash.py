"""Causal attention on TPUs by the splash kernel of JAX: no scores in memory, forward or backward.

Axis letters as in `models.transformer`. The kernel handles one sequence on one device; here it is mapped over
sequences, and over the mesh of `jax.set_mesh` by hand, as XLA cannot cut a kernel.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from m2po_jax.models.sharding import BATCH_AXES, MESH_AXES, parts

LANES = 128
"""Width of a TPU's vector: the kernel wants blocks of tokens, and heads, of multiples of it."""
BLOCK = 512
"""Most queries, and most keys, of a block."""


class Segments(NamedTuple):
    """Which keys a query sees: those of its own segment, at its own place or before it."""

    ids_BT: Array
    """int32; padding is a segment of its own."""


def on_tpu() -> bool:
    """Whether programs are being made for a TPU: that of the mesh of `jax.set_mesh`, or else the default device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return platform == "tpu"


def fits(shape_BT: tuple[int, ...], query_heads: int, kv_heads: int, head_dim: int) -> bool:
    """Whether the kernel takes these sizes, and the mesh divides them."""
    batch, length = shape_BT
    whole = batch % parts("B") == 0 and query_heads % parts("H") == 0 and kv_heads % parts("K") == 0
    return whole and length % LANES == 0 and head_dim % LANES == 0


def splash_attention(q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, segments: Segments, interpret: bool = False) -> Array:
    """Softmax attention (B, T, H, head_dim) within segments, to the past; gradients come from kernels too.

    Args:
        interpret: run the kernel's own program, slowly, on any device.
    """
    local = partial(_local, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if set(MESH_AXES) <= set(mesh.axis_names):
        heads, rows = PartitionSpec(BATCH_AXES, None, "tensor"), PartitionSpec(BATCH_AXES)
        local = jax.shard_map(local, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False)
    return local(q_BTHd, k_BTKd, v_BTKd, segments.ids_BT)


def _local(q_BTHd: Array, k_BTKd: Array, v_BTKd: Array, ids_BT: Array, interpret: bool) -> Array:
    """On one device: a program a sequence."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    _, length, heads, head_dim = q_BTHd.shape
    attend = _kernel(length, heads, interpret)
    q_BHTd, k_BKTd, v_BKTd = (jnp.swapaxes(x, 1, 2) for x in (q_BTHd * head_dim**-0.5, k_BTKd, v_BTKd))
    out_BHTd = jax.vmap(lambda q, k, v, ids: attend(q, k, v, kernel.SegmentIds(ids, ids)))(
        q_BHTd, k_BKTd, v_BKTd, ids_BT
    )
    return jnp.swapaxes(out_BHTd, 1, 2)


def _kernel(length: int, heads: int, interpret: bool) -> Any:
    # Imported late: it takes a second that only programs for TPUs have to spend.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block = next(size for size in (BLOCK, 384, 256, LANES) if length % size == 0)
    sizes = kernel.BlockSizes(
        block_q=block, block_kv=block, block_kv_compute=block,
        block_q_dkv=block, block_kv_dkv=block, block_kv_dkv_compute=block,
        block_q_dq=block, block_kv_dq=block,
    )  # fmt: skip
    return kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((length, length))] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attended",
        interpret=interpret,
    )
