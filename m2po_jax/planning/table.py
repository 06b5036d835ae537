"""A plan as text to read and as JSON to keep."""

import dataclasses
import json
from typing import Any

from m2po_jax import __version__
from m2po_jax.models.chips import GiB
from m2po_jax.planning.plan import MASK_PASSES, Plan, ProgramPlan
from m2po_jax.planning.programs import decode_steps, micro_batch_rows

MOST_SHARE = 0.9
"""Share of HBM above which a plan is called tight."""
MOST_COLLECTIVES = 0.2
"""Time of collectives over that of compute up to which they are taken to be hidden behind it."""
ROOMY = 0.6
"""Share of HBM below which twice the rows in a micro-batch may well fit."""


def to_json(plan: Plan) -> str:
    """Every number of a plan, with the configuration, as the text of a JSON file."""
    document: dict[str, Any] = {"package_version": __version__, **dataclasses.asdict(plan), "fits": plan.fits}
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def to_text(plan: Plan) -> str:
    """What a person wants to know, in lines of at most 110 characters."""
    mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    title = f"update of one mini-batch (compiled in {plan.update.compile_s:.0f} s); GiB a chip"
    lines = [f"{plan.config.name} on {plan.topology}: {plan.devices} chips, mesh {mesh}", "", title]
    lines += [*_program(plan, plan.update, plan.devices), *_efficiency(plan), ""]
    if (generator := plan.generator) is not None:
        seconds, copies = generator.program.compile_s, generator.devices // generator.tensor
        lines += [
            f"generation of one work unit on {generator.topology}: policy copied {copies} times, each cut in"
            f" {generator.tensor} (compiled in {seconds:.0f} s); GiB a chip",
            *_program(plan, generator.program, generator.devices),
        ]
        if generator.program.bounds is not None:
            lines.append(f"  no more than            {generator.most_tokens_per_s:>10,.0f}   tokens/s, a bound too")
        lines.append("")
    lines += [*_store(plan), ""] if plan.store else []
    lines += _verdict(plan)
    return "\n".join(lines) + "\n"


def _program(plan: Plan, program: ProgramPlan, devices: int) -> list[str]:
    memory = program.memory
    parts = {
        "parameters": memory.params,
        "optimiser": memory.optimizer,
        "batch": memory.batch,
        "gradients, activations" if program.name == "update" else "cache, activations": memory.working,
        "code": memory.code,
        "peak": memory.peak,
    }
    if memory.refused is not None:
        parts = {name: parts[name] for name in ("parameters", "optimiser", "peak")}
    lines = [f"  {name:24}{size / GiB:10.2f}" for name, size in parts.items()]
    lines[-1] += f"   {memory.peak / memory.hbm:.0%} of the {memory.hbm / GiB:.0f} of a {plan.chip.name}"
    return lines + _work(plan, program, devices) if program.costs is not None else lines


def _work(plan: Plan, program: ProgramPlan, devices: int) -> list[str]:
    costs, bounds = program.costs, program.bounds
    assert costs is not None and bounds is not None
    ratio = program.flops * devices / program.executed_flops
    lines = [
        f"  FLOPs, all chips        {_si(program.flops * devices):>10}   counted in the compiled program",
        f"                          {_si(program.executed_flops):>10}   closed form, with what is computed again;"
        f" counted is {ratio:.2f} of it",
        f"                          {_si(program.useful_flops):>10}   closed form, what MFU counts",
        f"  bytes through HBM       {_si(costs.hbm_bytes):>10}   a chip",
    ]
    if program.kernel_flops:
        lines.append(f"  of the FLOPs            {program.kernel_flops / program.flops:>10.0%}   in attention kernels")
    for kind, traffic in costs.collectives.items():
        lines.append(
            f"  {kind:22}{traffic.count:12,}   a chip, {_si(traffic.payload_bytes)}B, of which it sends"
            f" {_si(traffic.sent_bytes)}B"
        )
    if program.data_loops:
        trips = MASK_PASSES if program.name == "update" else _decode_steps(plan)
        lines.append(f"  assumed                 {trips:>10,}   trips of loops that depend on data")
    return [
        *lines,
        f"  no less than            {bounds.bound_s:>9.3g}s   by {bounds.limit}: compute {bounds.compute_s:.3g}, HBM"
        f" {bounds.hbm_s:.3g}, interconnect {bounds.interconnect_s:.3g} s",
        f"  no more MFU than        {program.most_mfu:>10.0%}   a bound from published peaks, not a prediction",
    ]


def _decode_steps(plan: Plan) -> int:
    assert plan.generator is not None
    return decode_steps(plan.config, plan.generator.devices // plan.generator.tensor)


def _efficiency(plan: Plan) -> list[str]:
    """Where an update's time goes beside useful products, and what would save some of it."""
    update = plan.update
    if update.costs is None:
        return []
    share, first = update.collectives_share, update.first_pass_flops / update.executed_flops
    again = 1.0 - first - update.useful_flops / update.executed_flops
    lines = [f"  collectives             {share:>10.0%}   of the time of compute, {_of_collectives(plan)}"]
    if first:
        lines.append(f"  not counted by MFU      {first:>10.0%}   of the FLOPs: the pass from which the mask is taken")
    keep = " (--model.remat dots: less)" if plan.config.model.remat == "full" else ""
    return [
        *lines,
        f"  {'' if first else 'not counted by MFU':22}  {again:>10.0%}   of the FLOPs: computed again for the backward"
        f" pass{keep}",
    ]


def _of_collectives(plan: Plan) -> str:
    """What to make of their share. Weights cross the mesh once a micro-batch and pass, whatever its rows."""
    update, micro_batches = plan.update, plan.config.learner.micro_batches
    assert update.costs is not None
    if update.collectives_share <= MOST_COLLECTIVES:
        return "so that they can be hidden"
    sums = update.costs.collectives.get("all-reduce")
    if plan.mesh["tensor"] > 1 and sums is not None and 2 * sums.sent_bytes > update.costs.sent_bytes:
        return f"most of it sums over tensor: try --mesh.tensor {plan.mesh['tensor'] // 2}"
    if micro_batches > 1 and update.memory.peak < ROOMY * update.memory.hbm:
        return f"less with --learner.micro-batches {micro_batches // 2}"
    return "less with more rows a chip, but there is no room"


def _store(plan: Plan) -> list[str]:
    cost = plan.store
    assert cost is not None
    return [
        f"store, if every update takes the bound of {cost.update_s:.3g} s; before compression, at full lengths",
        f"  rollouts                {_si(cost.rollout_bytes_per_batch):>10}B  a batch,"
        f" {_si(cost.rollout_bytes_per_hour)}B an hour",
        f"  weights                 {_si(cost.weights_bytes):>10}B  a version,"
        f" {_si(cost.weights_bytes_per_hour)}B an hour written",
        f"  weights kept            {_si(cost.weights_kept_bytes):>10}B  in {cost.weights_kept} versions",
        f"  checkpoints             {_si(cost.checkpoint_bytes):>10}B  kept",
        f"  objects                 {cost.objects_per_hour:>10,.0f}   created an hour",
        f"  requests                {cost.requests_per_hour:>10,.0f}   an hour, of one learner and one generator",
    ]


def _verdict(plan: Plan) -> list[str]:
    lines = []
    for program in plan.programs:
        memory = program.memory
        share = memory.peak / memory.hbm
        if not memory.fits:
            lines.append(f"{program.name} DOES NOT FIT: {_advice(plan, program)}")
        elif share > MOST_SHARE:
            lines.append(f"{program.name} fits, but with {share:.0%} of HBM it is tight: {_advice(plan, program)}")
        else:
            lines.append(f"{program.name} fits, with {1 - share:.0%} of HBM to spare")
    return [*lines, f"figures of the chip: {plan.chip.source}"]


def _advice(plan: Plan, program: ProgramPlan) -> str:
    """What to change, the cheapest first."""
    config, memory = plan.config, program.memory
    held = memory.params + memory.optimizer
    parts = plan.mesh["data"] * plan.mesh["fsdp"]
    ways = []
    if plan.mesh["data"] > 1:
        ways.append(f"cut the parameters over all chips (--mesh.fsdp {parts})")
    if program.name == "generate":
        ways.append(f"make smaller work units (--rollouts.units-per-batch {2 * config.rollouts.units_per_batch})")
    elif held < memory.hbm:
        if config.model.remat != "full":
            ways.append("keep less for the backward pass (--model.remat full)")
        rows = micro_batch_rows(plan.config)
        if rows > parts:
            ways.append(f"use more micro-batches (--learner.micro-batches {2 * config.learner.micro_batches})")
        else:
            ways.append("each chip has one row of a micro-batch already: cut rows themselves (--mesh.tensor 2)")
    else:
        ways.append("parameters and optimiser alone are too large")
    return "; ".join([*ways, "or take a larger slice"])


def _si(number: float) -> str:
    """Three digits and a prefix: 1.23 T."""
    for prefix in ("", "k", "M", "G", "T", "P", "E"):
        if abs(number) < 999.5:
            return f"{number:.3g} {prefix}"
        number /= 1000.0
    return f"{number:.3g} Z"
