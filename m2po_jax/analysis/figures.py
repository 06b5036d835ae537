"""Figures from runs: each function takes runs and returns a matplotlib Figure, without pyplot or global state."""

import io
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from m2po_jax.analysis.curves import Curve, bin_width, seed_curve
from m2po_jax.analysis.frames import RunData, arms
from m2po_jax.analysis.palette import AGES, GRID, INK, MUTED, SURFACE, Style, dress, styles
from m2po_jax.objectives import defaults

AGE_EDGES = (0, 1, 4, 16, 64, 256)
"""Lower ends of the age buckets of `log_ratio_histogram`, in model updates; the last has no upper end."""

PNG_DPI = 160
"""Dots an inch of PNG figures."""

_STEPS = (1, 2, 2.5, 5, 10)
_SVG_METADATA = ("Creator", "Date", "Format", "Type")


def learning_curves(runs: Sequence[RunData]) -> Figure:
    """Held-out accuracy above, reward of the training batches below, against model updates.

    Lines are means over seeds, bands run from the smallest to the largest seed. An open circle stands at version k
    of an arm with staleness k > 0, where its initial phase on the base policy's data ends.
    """
    figure = _figure(8.6, 6.6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.7, 1))
    look, width = styles(runs), bin_width(runs)
    dress(upper, "Held-out accuracy", ylabel="share of prompts solved")
    dress(lower, "Reward in training", xlabel="model updates", ylabel=f"reward, mean of {width} updates")
    ends: dict[str, tuple[float, float]] = {}
    for name, members in arms(runs).items():
        accuracy = seed_curve(members, "accuracy", table="evaluations")
        _draw(upper, accuracy, look[name])
        _draw(lower, seed_curve(members, "reward_mean", width=width), look[name])
        _mark_fresh(upper, accuracy, members[0].config.staleness.k, look[name])
        if len(accuracy):
            ends[name] = (accuracy.x[-1], accuracy.mean[-1])
    for axes in (upper, lower):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(6, steps=_STEPS))
        _frame_updates(axes, runs)
        _shade_base_phase(axes, runs, label=axes is upper)
    _label_ends(upper, ends, runs, look)
    _say_if_empty(upper, ends, "no evaluation yet")
    return figure


def masked_fraction(runs: Sequence[RunData]) -> Figure:
    """Share of response tokens whose gradient is dropped (masked by M2PO, on the active clip branch in GRPO).

    The vertical scale is logarithmic above 0.01 % and linear below, so that 0 is on it.
    """
    figure = _figure(8.6, 4.0)
    axes = figure.subplots()
    look, width = styles(runs), bin_width(runs)
    dress(axes, "Tokens masked or clipped", xlabel="model updates", ylabel=f"share of tokens, mean of {width} updates")
    ends: dict[str, tuple[float, float]] = {}
    for name, members in arms(runs).items():
        curve = seed_curve(members, "masked_frac", width=width)
        _draw(axes, curve, look[name])
        if len(curve):
            ends[name] = (curve.x[-1], curve.mean[-1])
    axes.set_yscale("symlog", linthresh=1e-4, linscale=0.6)
    axes.set_ylim(bottom=-1e-5, top=max(0.1, axes.get_ylim()[1]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4%}".rstrip("0%").rstrip(".") + "%"))
    axes.yaxis.set_minor_locator(NullLocator())
    _frame_updates(axes, runs)
    _shade_base_phase(axes, runs, label=False)
    _label_ends(axes, ends, runs, look)
    _say_if_empty(axes, ends, "no update yet")
    return figure


def second_moment(runs: Sequence[RunData]) -> Figure:
    """M2 of the trust-region tokens before masking (pale) and of those that are kept (strong), a panel an arm.

    The dotted line is the arm's threshold tau, where its objective has one.
    """
    grouped, look, width = arms(runs), styles(runs), bin_width(runs)
    figure, panels = _grid(len(grouped), sharey=True)
    for axes, (name, members) in zip(panels, grouped.items(), strict=True):
        dress(axes, _arm_label(name, members), xlabel="model updates", ylabel="M2 (log scale)")
        axes.label_outer()
        before = seed_curve(members, "m2_trust_region", width=width)
        after = seed_curve(members, "m2_kept", width=width)
        color = look[name].color
        axes.plot(before.x, _positive(before.mean), color=color, alpha=0.3, linewidth=4.5, label="before")
        axes.fill_between(after.x, _positive(after.low), _positive(after.high), color=color, alpha=0.15, linewidth=0)
        axes.plot(after.x, _positive(after.mean), color=color, linewidth=1.9, label="kept")
        _threshold_line(axes, members[0])
        _frame_updates(axes, runs)
        legend = axes.legend(loc="lower right", fontsize=8.5, frameon=False, ncols=2, handlelength=1.4)
        _tint(legend.get_texts())
        _say_if_empty(axes, after.x, "no update yet")
    _log_scales(panels)
    return figure


def log_ratio_histogram(runs: Sequence[RunData]) -> Figure:
    """Density of the log importance weights of the sampled tokens by age, on a logarithmic scale, a panel an arm.

    All panels share one range, which holds 99.9 % of the tokens of the widest arm; what lies outside is counted in
    the panel.
    """
    grouped = arms(runs)
    tokens = {name: pd.concat([_ages(run.diagnostics) for run in members]) for name, members in grouped.items()}
    limit = max((_reach(frame["log_ratio"]) for frame in tokens.values()), default=0.1)
    edges = np.linspace(-limit, limit, 102)
    figure, panels = _grid(len(grouped), sharey=True)
    for axes, (name, frame) in zip(panels, tokens.items(), strict=True):
        dress(axes, _arm_label(name, grouped[name]), xlabel="log r, log importance weight", ylabel="density (log)")
        axes.label_outer()
        for bucket, lower in enumerate(AGE_EDGES):
            values = frame["log_ratio"][frame["bucket"] == bucket].to_numpy(float)
            if len(values):
                counts, _ = np.histogram(values, edges)
                density = counts / (len(values) * np.diff(edges))
                axes.stairs(_positive(density), edges, color=AGES[bucket], linewidth=1.4, label=_age_label(lower))
        outside = int((frame["log_ratio"].abs() > limit).sum())
        _histogram_remark(axes, len(frame), outside)
        axes.set_xlim(-limit, limit)
        _say_if_empty(axes, frame, "no token diagnostics")
    _log_scales(panels)
    return figure


def sparkline(values: Sequence[float] | np.ndarray, width: int | None = None) -> str:
    """Values as a line of block characters from their least to their greatest; a space where not finite.

    With `width`, longer input is averaged into that many characters. Equal values give the lowest block.
    """
    numbers = np.asarray(values, float)
    if width is not None and len(numbers) > width:
        parts = [part[np.isfinite(part)] for part in np.array_split(numbers, width)]
        numbers = np.array([part.mean() if len(part) else np.nan for part in parts])
    finite = numbers[np.isfinite(numbers)]
    low, span = (finite.min(), finite.max() - finite.min()) if len(finite) else (0.0, 0.0)
    blocks = "▁▂▃▄▅▆▇█"
    heights = np.zeros(len(numbers)) if span == 0 else (numbers - low) / span * (len(blocks) - 1)
    return "".join(
        blocks[round(float(height))] if np.isfinite(number) else " "
        for number, height in zip(numbers, heights, strict=True)
    )


def png(figure: Figure) -> bytes:
    """The figure as PNG bytes on a white page."""
    buffer = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(buffer, format="png", dpi=PNG_DPI, facecolor=SURFACE)
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element with text as text, the same bytes for the same figure."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "m2po"}):
        figure.savefig(buffer, format="svg", transparent=True, metadata=dict.fromkeys(_SVG_METADATA))
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG."""
    path.write_bytes(png(figure))


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained", facecolor="none")


def _grid(count: int, *, sharey: bool) -> tuple[Figure, list[Axes]]:
    columns = min(max(count, 1), 2)
    rows = -(-max(count, 1) // columns)
    figure = _figure(8.6 if columns == 2 else 6.0, 2.7 * rows + 0.3)
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=sharey, squeeze=False).flat)
    for spare in panels[count:]:
        spare.remove()
    return figure, panels[:count]


def _draw(axes: Axes, curve: Curve, style: Style) -> None:
    axes.fill_between(curve.x, curve.low, curve.high, color=style.color, alpha=0.15, linewidth=0)
    axes.plot(curve.x, curve.mean, **style.line)


def _mark_fresh(axes: Axes, curve: Curve, k: int, style: Style) -> None:
    if k > 0 and len(curve) and curve.x[0] <= k <= curve.x[-1]:
        height = np.interp(k, curve.x, curve.mean)
        axes.plot(
            [k], [height], marker="o", markersize=7, color=SURFACE, markeredgecolor=style.color, markeredgewidth=1.8,
            linestyle="none", zorder=5,
        )  # fmt: skip


def _shade_base_phase(axes: Axes, runs: Sequence[RunData], *, label: bool) -> None:
    """Shade the updates on version 0's data, where all stale arms share one staleness."""
    ages = {run.config.staleness.k for run in runs} - {0}
    if len(ages) != 1 or (k := ages.pop()) > axes.get_xlim()[1]:
        return
    axes.axvspan(0, k, color=GRID, alpha=0.4, linewidth=0, zorder=0)
    if label:
        axes.annotate(
            f"stale arms see only\nthe base policy's data\nuntil update {k:,} (○)",
            xy=(0, 1), xytext=(6, -6), xycoords="axes fraction", textcoords="offset points",
            va="top", fontsize=8.5, color=MUTED,
        )  # fmt: skip


def _frame_updates(axes: Axes, runs: Sequence[RunData]) -> None:
    """Horizontal range from 0 to the furthest run."""
    furthest = max([run.progress for run in runs], default=0) or 1
    axes.set_xlim(0, furthest)
    ticks = MaxNLocator(6, integer=True, steps=_STEPS).tick_values(0, furthest)
    axes.set_xticks([tick for tick in ticks if 0 <= tick <= furthest])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def _label_ends(
    axes: Axes, ends: dict[str, tuple[float, float]], runs: Sequence[RunData], look: dict[str, Style]
) -> None:
    """Name each line at its right end, pushed apart where the names would overlap."""
    furthest = max((x for x, _ in ends.values()), default=0.0)
    to_axes = axes.transAxes.inverted()
    heights = {name: to_axes.transform(axes.transData.transform(end))[1] for name, end in ends.items()}
    height_pt = axes.bbox.height * 72 / axes.figure.dpi
    spread = _spread(heights, gap=14 / height_pt)
    edge = to_axes.transform(axes.transData.transform((furthest, 0)))[0] + 0.018
    for name, height in spread.items():
        color, short = look[name].color, ends[name][0] < 0.97 * furthest
        leader = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 1, "shrinkB": 1}
        axes.annotate(
            _arm_label(name, arms(runs)[name]), xy=ends[name], xycoords="data", xytext=(edge, height),
            textcoords="axes fraction", va="center", ha="left", fontsize=9.5, fontweight="bold",
            color=color, annotation_clip=False,
            arrowprops=leader | ({"linestyle": (0, (1, 4)), "alpha": 0.8} if short else {}),
        )  # fmt: skip
        if short:
            axes.plot(*ends[name], marker="x", markersize=7, markeredgewidth=1.8, color=color, linestyle="none")


def _spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Heights at least `gap` apart, in the same order, moved as little as groups of touching labels allow."""
    groups: list[list[str]] = []
    centre: list[float] = []
    for name in sorted(heights, key=heights.__getitem__):
        groups.append([name])
        centre.append(heights[name])
        while len(groups) > 1 and centre[-1] - centre[-2] < gap * (len(groups[-1]) + len(groups[-2])) / 2:
            last = groups.pop()
            groups[-1] = groups[-1] + last
            centre.pop()
            centre[-1] = sum(heights[member] for member in groups[-1]) / len(groups[-1])
    return {
        name: middle + (place - (len(group) - 1) / 2) * gap
        for group, middle in zip(groups, centre, strict=True)
        for place, name in enumerate(group)
    }


def _arm_label(name: str, members: Sequence[RunData]) -> str:
    unfinished = sum(not run.complete for run in members)
    return name if not unfinished else f"{name} (unfinished)"


def _threshold_line(axes: Axes, run: RunData) -> None:
    objective = run.config.objective
    threshold = {**defaults(objective.name), **objective.hyperparameters}.get("threshold")
    if isinstance(threshold, float) and threshold:
        axes.axhline(threshold, color=INK, linestyle=(0, (1, 2)), linewidth=1.2)
        axes.annotate(
            f"τ = {threshold:g}", xy=(0, threshold), xycoords=("axes fraction", "data"), xytext=(3, 3),
            textcoords="offset points", fontsize=8.5, color=INK,
        )  # fmt: skip


def _log_scales(panels: Sequence[Axes]) -> None:
    if panels and not any(np.isfinite(axes.dataLim.minposy) for axes in panels):
        panels[0].update_datalim([(0.0, 1e-4), (0.0, 1.0)])  # a logarithmic axis needs something positive on it
    for axes in panels:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=7))
        axes.yaxis.set_minor_locator(NullLocator())


def _positive(values: np.ndarray) -> np.ndarray:
    return np.where(values > 0, values, np.nan)


def _ages(diagnostics: pd.DataFrame) -> pd.DataFrame:
    known = diagnostics[np.isfinite(diagnostics["log_ratio"].astype(float))]
    age = known["staleness_updates"].to_numpy(float)
    return pd.DataFrame({"log_ratio": known["log_ratio"], "bucket": np.searchsorted(AGE_EDGES, age, "right") - 1})


def _reach(log_ratios: pd.Series) -> float:
    return max(0.1, float(log_ratios.abs().quantile(0.999))) if len(log_ratios) else 0.1


def _age_label(lower: int) -> str:
    place = AGE_EDGES.index(lower)
    if place == len(AGE_EDGES) - 1:
        return f"{lower}+"
    upper = AGE_EDGES[place + 1] - 1
    return f"{lower}" if upper == lower else f"{lower}–{upper}"


def _histogram_remark(axes: Axes, tokens: int, outside: int) -> None:
    if tokens:
        legend = axes.legend(
            loc="upper left",
            fontsize=8,
            frameon=False,
            title="age in updates",
            title_fontsize=8,
            handlelength=1.2,
            alignment="left",
        )
        _tint([*legend.get_texts(), legend.get_title()])
        remark = f"{tokens:,} tokens" + (f"\n{outside:,} beyond the range" if outside else "")
        axes.annotate(
            remark, xy=(1, 1), xytext=(-2, -4), xycoords="axes fraction", textcoords="offset points",
            ha="right", va="top", fontsize=8, color=MUTED,
        )  # fmt: skip


def _tint(texts: Iterable[Text]) -> None:
    for text in texts:
        text.set_color(MUTED)


def _say_if_empty(axes: Axes, data: Sized, message: str) -> None:
    if not len(data):
        axes.text(0.5, 0.5, message, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=10)
