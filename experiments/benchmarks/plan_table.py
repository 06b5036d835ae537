"""The smallest slice of each chip that each of the paper's models is trained on, with a tenth of HBM to spare.

Command:   python experiments/benchmarks/plan_table.py --runs runs/plans
Hardware:  any CPU with libtpu (pip install "jax[tpu]"), 4 GB; minutes a slice, a process each; done ones are kept.

Slices and settings are tried from the smallest on, where a closed form says that they may fit; what the compiler says
of them counts. On a slice, settings of tensor, rows of a micro-batch and remat are tried from the fastest on.
"""

import argparse
import csv
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from m2po_jax.config import Config
from m2po_jax.models.chips import CHIPS, GiB
from m2po_jax.models.parameters import size
from m2po_jax.planning.chips import SLICES, chips_in
from m2po_jax.planning.formulas import update_flops
from m2po_jax.planning.storage import parameters

PLANS = Path(__file__).parents[1] / "plans.py"
MOST_SHARE = 0.9
STATE_AND_GRADIENTS_BYTES = 20
"""A parameter: itself, two moments, its gradient and that of a micro-batch, float32."""
EMBEDDING_BYTES = 8
"""A number of an embedding in use: gathered for input and output in bfloat16, and its gradient in float32; another
gradient where input and output do not share one, or where tensor cuts it."""
MOST_TRIES = 3
"""Settings of one slice that are compiled before the next larger slice is."""
COLUMNS = (
    "model", "chip", "slice", "chips", "fsdp", "tensor", "micro-batches", "remat", "peak GiB", "share of HBM",
    "bound s", "set by", "collectives / compute", "most MFU", "counted / closed FLOPs", "compiled in s",
)  # fmt: skip


class Setting(NamedTuple):
    """How a model is laid out on a slice."""

    shape: str
    tensor: int
    rows: int
    """Responses of a micro-batch that the chips of one copy's part share."""
    remat: str

    @property
    def chips(self) -> int:
        return chips_in(self.shape)

    @property
    def fsdp(self) -> int:
        return self.chips // self.tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="runs/plans", help="folder for the plans and table.csv")
    parser.add_argument("--models", nargs="*", help="names in plans.py; default: all")
    parser.add_argument("--chips", nargs="*", default=list(CHIPS))
    parser.add_argument("--dry-run", action="store_true", help="print what would be tried, and compile nothing")
    parser.add_argument("--no-compile", action="store_true", help="a table of the plans that are there")
    arguments = parser.parse_args()
    from m2po_jax.catalog import find_experiment

    runs, rows = Path(arguments.runs), []
    for config in find_experiment(str(PLANS)):
        for chip in arguments.chips:
            if arguments.models and config.name not in arguments.models:
                continue
            if arguments.dry_run:
                print(config.name, chip)
                for s in itertools.islice(settings(config, chip, runs), 4):
                    print(" ", *s, f"{needed(config, s) / GiB:.1f} GiB, {seconds(config, chip, s):.3g} s")
                continue
            rows.append(row(config, chip, smallest(config, chip, runs, not arguments.no_compile)))
            with (runs / "table.csv").open("w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows([COLUMNS, *rows])
            print(*rows[-1], sep=", ", flush=True)


def smallest(config: Config, chip: str, runs: Path, may_compile: bool) -> dict | None:
    """The plan of the first setting with room to spare."""
    too_large: dict[str, float] = {}
    for setting in settings(config, chip, runs):
        if not may_compile and not (folder(config, chip, setting, runs) / "plan.json").exists():
            continue
        if needed(config, setting) >= too_large.get(setting.shape, float("inf")):
            continue
        plan = planned(config, chip, setting, runs)
        memory = plan["update"]["memory"]
        if plan["fits"] and memory["peak"] < MOST_SHARE * memory["hbm"]:
            return plan
        too_large[setting.shape] = needed(config, setting)
    return None


def settings(config: Config, chip: str, runs: Path) -> Iterator[Setting]:
    """From small slices to large; on one, what is planned already, and then the fastest, as a closed form tells.

    Settings that may turn out too large, so that compiling them would be in vain, count as slower than they are.
    """

    def is_made(setting: Setting) -> bool:
        return (folder(config, chip, setting, runs) / "plan.json").exists()

    def order(setting: Setting) -> tuple[bool, float]:
        tight = max(0.0, needed(config, setting) / CHIPS[chip].hbm_bytes - 0.8)
        return not is_made(setting), seconds(config, chip, setting) * (1.0 + 5.0 * tight)

    for shape in SLICES[chip]:
        choices = (Setting(shape, *choice) for choice in itertools.product((1, 2, 4), (8, 4, 2, 1), ("dots", "full")))
        able = (choice for choice in choices if divides(config, choice))
        able = (choice for choice in able if is_made(choice) or fits(config, chip, choice))
        yield from sorted(able, key=order)[:MOST_TRIES]


def seconds(config: Config, chip: str, setting: Setting) -> float:
    """Of compute and of collectives, one after the other: each pass gathers weights, each block adds up activations."""
    peaks, model, tensor = CHIPS[chip], replace(config.model, remat=setting.remat), setting.tensor
    passes = 5 if setting.remat == "full" else 4
    flops = update_flops(replace(config, model=model), kernels=True).executed / setting.chips
    tokens = setting.rows * (config.task.max_prompt_tokens + config.sampling.max_new_tokens)
    weights = passes * 2 * parameters(config) / tensor
    activations = passes * 2 * model.layers * 2 * (tensor - 1) / tensor * 2 * tokens * model.width
    sent = micro_batches(config, setting) * (weights + activations)
    return flops / peaks.flops_per_s + sent / peaks.ici_bytes_per_s


def micro_batches(config: Config, setting: Setting) -> int:
    return config.mini_batch_rows // (setting.rows * setting.fsdp)


def divides(config: Config, setting: Setting) -> bool:
    model = config.model
    heads = all(size(model, letter) % setting.tensor == 0 for letter in "HKFV")
    return heads and model.width % setting.fsdp == 0 and config.mini_batch_rows % (setting.rows * setting.fsdp) == 0


def fits(config: Config, chip: str, setting: Setting) -> bool:
    share = MOST_SHARE - (0.05 if setting.remat == "dots" else 0.0)  # the closed form knows less of these
    return needed(config, setting) < share * CHIPS[chip].hbm_bytes


def needed(config: Config, setting: Setting) -> float:
    """Bytes that a chip must hold, in closed form: state, gradients, embeddings, what the backward pass finds."""
    model, tensor = config.model, setting.tensor
    tokens = setting.rows * (config.task.max_prompt_tokens + config.sampling.max_new_tokens)
    state = STATE_AND_GRADIENTS_BYTES * parameters(config) / setting.chips
    embedding = EMBEDDING_BYTES + (4 if tensor > 1 or not model.tie_embeddings else 0)
    embedding *= model.width * (model.vocab_size or 0) / tensor
    heads = (model.query_heads + 2 * model.kv_heads) * model.head_dim
    products = (heads + 2 * model.mlp_width) / tensor + 2 * model.width
    kept = model.layers * (model.width + (products if setting.remat == "dots" else 0))
    at_work = 4 * (model.width + model.mlp_width / tensor)
    return state + embedding + 2 * tokens * (kept + at_work) + GiB / 2


def planned(config: Config, chip: str, setting: Setting, runs: Path) -> dict:
    """The plan of a setting, made unless it is there."""
    out = folder(config, chip, setting, runs)
    if not (out / "plan.json").exists():
        flags = {
            "topology": f"{chip}:{setting.shape}",
            "out": out,
            "mesh.fsdp": setting.fsdp,
            "mesh.tensor": setting.tensor,
            "learner.micro-batches": micro_batches(config, setting),
            "model.remat": setting.remat,
        }
        command = [sys.executable, "-m", "m2po_jax", "plan", f"{PLANS}:{config.name}", "--no-generator"]
        command.append("--learner.no-packing")  # responses of full length have a row each anyway
        words = [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        subprocess.run([*command, *words], stdout=subprocess.DEVNULL)
    return json.loads((out / "plan.json").read_text(encoding="utf-8"))


def folder(config: Config, chip: str, setting: Setting, runs: Path) -> Path:
    layout = f"tensor{setting.tensor}-rows{setting.rows}-{setting.remat}"
    return runs / f"{config.name}-{chip}-{setting.shape}-{layout}"


def row(config: Config, chip: str, plan: dict | None) -> tuple[str, ...]:
    if plan is None:
        return (config.name, chip, "no plan yet", *("",) * (len(COLUMNS) - 3))
    update, chips, mesh = plan["update"], plan["devices"], plan["mesh"]
    memory, bounds = update["memory"], update["bounds"]
    seconds = {"compute": bounds["compute_s"], "HBM": bounds["hbm_s"], "interconnect": bounds["interconnect_s"]}
    limit = max(seconds, key=lambda name: seconds[name])
    counted = (update["costs"]["flops"] + update["kernel_flops"]) * chips
    return (
        config.name,
        chip,
        plan["topology"].split(":")[1],
        str(chips),
        str(mesh["fsdp"]),
        str(mesh["tensor"]),
        str(plan["config"]["learner"]["micro_batches"]),
        plan["config"]["model"]["remat"],
        f"{memory['peak'] / GiB:.1f}",
        f"{memory['peak'] / memory['hbm']:.3f}",
        f"{seconds[limit]:.3g}",
        limit,
        f"{bounds['interconnect_s'] / bounds['compute_s']:.2f}",
        f"{update['most_mfu']:.2f}",
        f"{counted / update['executed_flops']:.2f}",
        f"{update['compile_s']:.0f}",
    )


if __name__ == "__main__":
    main()
