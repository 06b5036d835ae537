"""The HTML report: one self-contained page about one run or many, and its figures as PNG files."""

import dataclasses
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from m2po_jax import __version__
from m2po_jax.analysis import figures
from m2po_jax.analysis.frames import RunData, Sample, arm_notes, arms, find_runs, load, notes, rollout_samples
from m2po_jax.analysis.palette import DARK
from m2po_jax.analysis.table import default_pairs, formatted, paired_differences, speed, summary
from m2po_jax.config import Config, UserError, flatten
from m2po_jax.rollouts.store import Store

FIGURES: dict[str, Callable[[Sequence[RunData]], Figure]] = {
    "learning_curves": figures.learning_curves,
    "masked_fraction": figures.masked_fraction,
    "second_moment": figures.second_moment,
    "log_ratio_histogram": figures.log_ratio_histogram,
}
"""File name without ending -> what draws it."""

SAMPLES_PER_VERSION = 4
"""Rollouts shown of an arm's oldest and of its newest stored version."""

_LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy", "pandas", "pyarrow", "matplotlib")


def write(run_paths: Sequence[str | Path], output: str | Path | None = None) -> Path | str:
    """Write the page and `figures/*.png` beside it; returns where the page is, a path or a URL.

    `run_paths` are runs or folders of runs. `output` is the page's file (`*.html`) or its folder; without it the page
    goes into the run, or, for several, into the folder they share. Raises UserError for a path without runs.
    """
    runs = [load(path) for path in find_runs(run_paths)]
    folder, name = _destination([run.path for run in runs], output)
    drawn = {title: draw(runs) for title, draw in FIGURES.items()}
    store = Store.open(folder, create=True)
    for title, figure in drawn.items():
        store.replace(f"figures/{title}.png", figures.png(figure))
    store.replace(name, page(runs, drawn).encode())
    return f"{folder}/{name}" if "://" in folder else Path(folder) / name


def page(runs: Sequence[RunData], drawn: dict[str, Figure]) -> str:
    """The report's HTML: no request leaves it, and texts that a policy wrote are escaped."""
    environment = Environment(
        loader=PackageLoader("m2po_jax.analysis", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(_content(runs, drawn))


def inline_svg(figure: Figure, label: str) -> Markup:
    """The figure as an inline element that takes its size from the page and its colours from the page's theme."""
    text = figures.svg(figure)
    text = re.sub(r"<svg [^>]*?(viewBox=\"[^\"]*\")[^>]*>", rf'<svg \1 role="img" aria-label="{label}">', text, count=1)
    for color in DARK:
        text = text.replace(color, f"var({_variable(color)})")
    return Markup(text)


def configuration_differences(runs: Sequence[RunData]) -> pd.DataFrame:
    """Dotted field, then its value in each arm, for the fields that differ between arms (seed and name apart)."""
    flat = {name: flatten(members[0].config) for name, members in arms(runs).items()}
    fields = sorted(set().union(*flat.values()) - {"name", "seed"})
    rows = [{"field": field} | {name: _shown(values.get(field)) for name, values in flat.items()} for field in fields]
    return pd.DataFrame([row for row in rows if len(set(list(row.values())[1:])) > 1], columns=["field", *flat])


def environment_versions() -> dict[str, str]:
    """What the page was made with: this package, Python, and the libraries that are installed."""
    versions = {"m2po-jax": __version__, "python": platform.python_version()}
    for library in _LIBRARIES:
        try:
            versions[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _content(runs: Sequence[RunData], drawn: dict[str, Figure]) -> dict[str, Any]:
    grouped = arms(runs)
    seeds = sorted({run.seed for run in runs})
    pairs, speeds = default_pairs(runs), speed(runs)
    return {
        "title": ", ".join(grouped),
        "arms": list(grouped),
        "seeds": seeds,
        "updates": max(run.progress for run in runs),
        "made_at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "colors": {_variable(light): (light, dark) for light, dark in DARK.items()},
        "summary": formatted(summary(runs)),
        "differences": formatted(paired_differences(runs, pairs)) if pairs else None,
        "speed": formatted(speeds) if len(speeds.columns) > 1 else None,
        "figures": {title: inline_svg(figure, title.replace("_", " ")) for title, figure in drawn.items()},
        "samples": [(name, members[0].seed, _samples(members[0])) for name, members in grouped.items()],
        "configuration": configuration_differences(runs),
        "full_configuration": {name: _all_fields(members[0].config) for name, members in grouped.items()},
        "run_versions": sorted({run.package_version for run in runs}),
        "environment": environment_versions(),
        "notes": arm_notes(runs) + [note for run in runs for note in notes(run)],
        "paths": [(run.name, run.seed, Path(run.path).name, run.progress, run.complete) for run in runs],
    }


def _samples(run: RunData) -> list[tuple[int, list[Sample]]]:
    samples = rollout_samples(run, SAMPLES_PER_VERSION)
    versions = sorted({sample.version for sample in samples})
    return [(version, [sample for sample in samples if sample.version == version]) for version in versions]


def _destination(paths: Sequence[str], output: str | Path | None) -> tuple[str, str]:
    if output is not None:
        folder, _, name = str(output).rpartition("/")
        return (folder or ".", name) if name.endswith(".html") else (str(output), "report.html")
    if len(paths) == 1:
        return paths[0], "report.html"
    if remote := [path for path in paths if "://" in path]:
        raise UserError(f"{remote[0]} is not on this machine: say where the report goes with --output")
    return os.path.commonpath([os.path.abspath(path) for path in paths]), "report.html"


def _variable(color: str) -> str:
    return f"--c-{color[1:]}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def _all_fields(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2)
