"""Costs read from compiled programs: loops count as often as they run, collectives with what they send."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from m2po_jax.planning.costs import Traffic, _valid_pairs, costs, group_size
from m2po_jax.planning.hlo import parse

TRIPS, SIZE = 7, 32
FLOPS = 2 * SIZE**3


def compiled(function, *arguments):
    return jax.jit(function).lower(*arguments).compile()


def square(dtype=jnp.float32):
    return jax.ShapeDtypeStruct((SIZE, SIZE), dtype)


def chained(x, w):
    return jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, length=TRIPS)[0]


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    program = compiled(chained, square(), square())
    found = costs(parse(program.as_text()), 1)
    assert found.flops == TRIPS * FLOPS
    assert found.flops_once == FLOPS
    assert found.flops_once == pytest.approx(program.cost_analysis()["flops"], rel=0.1)
    assert found.collectives == {} and found.kernels == {}
    assert TRIPS * 3 * 4 * SIZE**2 <= found.hbm_bytes <= TRIPS * 10 * 4 * SIZE**2


def test_loops_in_loops_multiply():
    def nested(x, w):
        return jax.lax.scan(lambda x, _: (chained(x, w), None), x, length=3)[0]

    assert costs(parse(compiled(nested, square(), square()).as_text()), 1).flops == 3 * TRIPS * FLOPS


def test_a_stack_that_a_loop_walks_through_is_read_once():
    def stacked(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, ws)[0]

    stack = jax.ShapeDtypeStruct((100, SIZE, SIZE), jnp.float32)
    found = costs(parse(compiled(stacked, square(), stack).as_text()), 1)
    assert found.hbm_bytes < 100 * 10 * 4 * SIZE**2  # with all of the stack at each trip it would be 100 times 100


def test_a_loop_that_depends_on_data_counts_as_assumed_and_is_named():
    def until_small(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: x @ w, x)

    program = parse(compiled(until_small, square(), square()).as_text())
    assert costs(program, 1).flops == FLOPS
    assert costs(program, 1, unknown_trips=5).flops == 5 * FLOPS
    assert len(program.unknown_loops()) == 1 and "while" in program.unknown_loops()[0]
    assert parse(compiled(chained, square(), square()).as_text()).unknown_loops() == []


def test_a_batched_product_counts_once_for_each():
    stack = jax.ShapeDtypeStruct((5, SIZE, SIZE), jnp.float32)
    program = compiled(lambda a, b: jnp.einsum("bij,bjk->bik", a, b), stack, stack)
    assert costs(parse(program.as_text()), 1).flops == 5 * FLOPS


def test_an_all_reduce_in_a_loop(devices):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=devices)
    rows, columns = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "x"), ("x", None)))
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=rows)
    w = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=columns)

    def summed(x, w):
        def step(x, _):
            whole = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, PartitionSpec(None, None)))
            return jax.lax.with_sharding_constraint(jnp.sin(whole), rows), None

        return jax.lax.scan(step, x, length=TRIPS)[0]

    found = costs(parse(compiled(summed, x, w).as_text()), 8)
    array = 4 * SIZE**2
    assert found.flops == TRIPS * FLOPS / 8
    assert found.collectives["all-reduce"] == Traffic(TRIPS, TRIPS * array, TRIPS * 2 * array * 7 // 8)
    assert found.sent_bytes == sum(traffic.sent_bytes for traffic in found.collectives.values())


def test_an_all_gather_sends_its_piece_to_every_other_member(devices):
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    x = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("y")))
    gather = jax.jit(lambda x: x * 2.0, out_shardings=NamedSharding(mesh, PartitionSpec()))
    found = costs(parse(gather.lower(x).compile().as_text()), 8)
    assert found.collectives == {"all-gather": Traffic(1, 4 * SIZE**2, 4 * SIZE**2 * 3 // 4)}


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3}}, x", 2),
        ("replica_groups=[2,4]<=[8], x", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=1,'axis_2'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, d={0}", 4),
        ("replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={0}", 8),
        ("replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)4}, dimensions={0}", 8),
        ("replica_groups={}", 8),
    ],
)
def test_groups(attributes, size):
    assert group_size(attributes, 8) == size


TPU_BATCHED = """
HloModule m, entry_computation_layout={()->f32[]}

%region.1 (p.1: (s32[], f32[4])) -> pred[] {
  %c.1 = s32[]{:T(128)} constant(12)
  %p.1 = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %g.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%g.1, %c.1), direction=LT
}

%body.1 (p.2: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p.2 = (s32[]{:T(128)}, f32[4]{0}) parameter(0)
  %two.1 = s32[]{:T(128)} constant(3)
  %g.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  %next.1 = s32[]{:T(128)} add(%g.2, %two.1)
  %a.1 = bf16[4,8,512,128]{3,2,1,0:T(8,128)(2,1)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %b.1 = bf16[4,8,4096,128]{3,2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
  %conv.1 = f32[4,8,512,4096]{3,2,1,0:T(8,128)} convolution(%a.1, %b.1), window={size=4x8 stride=3x7 lhs_dilate=4x8}, \
dim_labels=01bf_01oi->01bf
  %g.3 = f32[4]{0} get-tuple-element(%p.2), index=1
  ROOT %t.1 = (s32[]{:T(128)}, f32[4]{0}) tuple(%next.1, %g.3)
}

ENTRY %main.1 (x.1: f32[4]) -> f32[4] {
  %x.1 = f32[4]{0} parameter(0)
  %start.1 = s32[]{:T(128)} constant(0)
  %copied.1 = s32[]{:T(128)} copy(%start.1)
  %t.2 = (s32[]{:T(128)}, f32[4]{0}) tuple(%copied.1, /*index=1*/%x.1)
  %w.1 = (s32[]{:T(128)}, f32[4]{0}) while(%t.2), condition=%region.1, body=%body.1
  ROOT %g.4 = f32[4]{0} get-tuple-element(%w.1), index=1
}
"""


def test_a_product_that_a_tpu_writes_as_a_convolution_in_a_loop_that_it_does_not_count():
    """Batch axes stand as dilated spatial axes; on-chip operands cost no HBM; the counter goes up in threes."""
    found = costs(parse(TPU_BATCHED), 1)
    assert found.flops_once == 2.0 * 4 * 8 * 512 * 4096 * 128
    assert found.flops == 4 * found.flops_once
    written, read = 4 * 4 * 8 * 512 * 4096, 2 * 4 * 8 * 4096 * 128
    assert 0 <= found.hbm_bytes - 4 * (written + read) < 1000


def test_positions_of_a_window_that_meet_padding_do_not_count():
    assert _valid_pairs(8, 1, 8, {}) == 8
    assert _valid_pairs(4, 3, 4, {"pad": "1_1"}) == 3 * 4 - 2
    assert _valid_pairs(4, 4, 4, {"stride": "3", "lhs_dilate": "4"}) == 4


TPU_CHAIN = """
HloModule m, entry_computation_layout={()->f32[]}

%start.1 (p.1: bf16[128,64]) -> (bf16[128,64], bf16[128,256]) {
  %p.1 = bf16[128,64]{1,0} parameter(0)
  %all-gather.1 = bf16[128,256]{1,0} all-gather(%p.1), channel_id=9, replica_groups=[1,4]<=[4], dimensions={1}, \
frontend_attributes={chain_id="0"}
  ROOT %begun.1 = (bf16[128,64]{1,0}, bf16[128,256]{1,0}) custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveStart"
}

%step.1 (p.2: bf16[128,64], p.3: bf16[128,256], p.4: f32[8]) -> (f32[8], bf16[128,64], bf16[128,256]) {
  %p.2 = bf16[128,64]{1,0} parameter(0)
  %p.3 = bf16[128,256]{1,0} parameter(1)
  %p.4 = f32[8]{0} parameter(2)
  %sine.1 = f32[8]{0} sine(%p.4)
  %all-gather.2 = bf16[128,256]{1,0} all-gather(%p.2), channel_id=9, replica_groups=[1,4]<=[4], dimensions={1}, \
frontend_attributes={chain_id="0"}
  ROOT %t.1 = (f32[8]{0}, bf16[128,64]{1,0}, bf16[128,256]{1,0}) tuple(%sine.1, %p.2, %all-gather.2)
}

ENTRY %main.1 (x.1: bf16[128,64], y.1: f32[8]) -> f32[8] {
  %x.1 = bf16[128,64]{1,0} parameter(0)
  %y.1 = f32[8]{0} parameter(1)
  %f.1 = (bf16[128,64]{1,0}, bf16[128,256]{1,0}) fusion(%x.1), kind=kCustom, calls=%start.1
  %g.1 = bf16[128,64]{1,0} get-tuple-element(%f.1), index=0
  %g.2 = bf16[128,256]{1,0} get-tuple-element(%f.1), index=1
  %f.2 = (f32[8]{0}, bf16[128,64]{1,0}, bf16[128,256]{1,0}) fusion(%g.1, %g.2, %y.1), kind=kCustom, calls=%step.1
  ROOT %g.3 = f32[8]{0} get-tuple-element(%f.2), index=0
}
"""


def test_a_gather_that_goes_on_through_several_fusions_counts_once():
    """Each fusion shows the whole gather, of which it advances a part while it computes."""
    found = costs(parse(TPU_CHAIN.replace("\\\n", "")), 4)
    shard = 2 * 128 * 64
    assert found.collectives == {"all-gather": Traffic(1, 4 * shard, 3 * shard)}
    assert found.hbm_bytes >= 5 * shard + 2 * 4 * 8
