"""The smallest slice of each chip that each of the paper's models is trained on, with a tenth of HBM to spare.

Command:   python experiments/benchmarks/plan_table.py --runs runs/plans
Hardware:  any CPU with libtpu (pip install "jax[tpu]"), 4 GB; minutes a slice, a process each; done ones are kept.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from m2po_jax.config import Config
from m2po_jax.models.chips import CHIPS, GiB
from m2po_jax.planning.chips import SLICES, chips_in
from m2po_jax.planning.storage import parameters

PLANS = Path(__file__).parents[1] / "plans.py"
MOST_SHARE = 0.9
STATE_AND_GRADIENTS_BYTES = 20
"""A parameter: itself, two moments, its gradient and that of a micro-batch, float32."""
COLUMNS = (
    "model", "chip", "slice", "micro-batches", "peak, GiB", "of HBM", "bound, s an update", "by", "most MFU",
    "counted / closed FLOPs", "compiled in, s",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs/plans", help="folder for the plans and table.md")
    parser.add_argument("--models", nargs="*", help="names in plans.py; default: all")
    parser.add_argument("--chips", nargs="*", default=list(CHIPS))
    arguments = parser.parse_args()
    from m2po_jax.catalog import find_experiment

    rows = []
    for chip in arguments.chips:
        for config in find_experiment(str(PLANS)):
            if arguments.models and config.name not in arguments.models:
                continue
            rows.append(row(config, chip, smallest(config, chip, Path(arguments.runs))))
            text = "\n".join(line(cells) for cells in (COLUMNS, ("---",) * len(COLUMNS), *rows))
            (Path(arguments.runs) / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def smallest(config: Config, chip: str, runs: Path) -> dict | None:
    """The plan of the first slice that is large enough."""
    for shape in SLICES[chip]:
        count = chips_in(shape)
        if least_bytes(config, count) > MOST_SHARE * CHIPS[chip].hbm_bytes:
            continue
        plan = planned(config, f"{chip}:{shape}", count, runs)
        memory = plan["update"]["memory"]
        if plan["fits"] and memory["peak"] < MOST_SHARE * memory["hbm"]:
            return plan
    return None


def least_bytes(config: Config, chips: int) -> float:
    """What a chip must hold at least: state, gradients, a whole embedding's, the input of each block of a sequence."""
    tokens = config.task.max_prompt_tokens + config.sampling.max_new_tokens
    inputs = 2 * config.model.layers * tokens * config.model.width
    embedding = 4 * config.model.width * (config.model.vocab_size or 0)
    return STATE_AND_GRADIENTS_BYTES * parameters(config) / chips + embedding + inputs


def planned(config: Config, topology: str, chips: int, runs: Path) -> dict:
    """The plan with parameters cut over all chips and one sequence a chip at a time, made unless it is there."""
    out = runs / f"{config.name}-{topology.replace(':', '-')}"
    if not (out / "plan.json").exists():
        micro_batches = max(1, updates_rows(config) // chips)
        flags = {"topology": topology, "out": out, "mesh.fsdp": chips, "learner.micro-batches": micro_batches}
        command = [sys.executable, "-m", "m2po_jax", "plan", f"{PLANS}:{config.name}", "--no-generator"]
        subprocess.run([*command, *(word for flag, value in flags.items() for word in (f"--{flag}", str(value)))])
    return json.loads((out / "plan.json").read_text(encoding="utf-8"))


def updates_rows(config: Config) -> int:
    return config.rollouts.prompts_per_batch * config.rollouts.group_size // config.learner.updates_per_batch


def row(config: Config, chip: str, plan: dict | None) -> tuple[str, ...]:
    if plan is None:
        return (config.name, chip, "none", *("",) * (len(COLUMNS) - 3))
    update, chips = plan["update"], plan["devices"]
    memory, bounds = update["memory"], update["bounds"]
    seconds = {"compute": bounds["compute_s"], "HBM": bounds["hbm_s"], "interconnect": bounds["interconnect_s"]}
    limit = max(seconds, key=lambda name: seconds[name])
    counted = (update["costs"]["flops"] + update["kernel_flops"]) * chips
    return (
        config.name,
        chip,
        f"{plan['topology'].split(':')[1]} ({chips})",
        str(plan["config"]["learner"]["micro_batches"]),
        f"{memory['peak'] / GiB:.1f}",
        f"{memory['peak'] / memory['hbm']:.0%}",
        f"{seconds[limit]:.3g}",
        limit,
        f"{update['most_mfu']:.0%}",
        f"{counted / update['executed_flops']:.2f}",
        f"{update['compile_s']:.0f}",
    )


def line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
