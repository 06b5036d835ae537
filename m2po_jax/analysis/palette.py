"""Colours and line styles of arms, and the look that all figures share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from m2po_jax.analysis.frames import RunData, arms

INK = "#1f2328"
"""Text, and the on-policy reference."""
MUTED = "#656d76"
"""Axes, tick labels, remarks."""
GRID = "#d9dee3"
"""Grid lines and the shade of the initial phase."""
SURFACE = "#ffffff"
"""Page behind a figure; the inside of open markers."""

BLUE, ORANGE, VERMILION, GREEN, PURPLE, SKY, OCHRE = (
    "#0072b2", "#e69f00", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#8c6d1f",
)  # fmt: skip
"""Okabe and Ito's colours, told apart with any colour vision (yellow, too pale for a line, is ochre here)."""

AGES = ("#addc30", "#42be71", "#1f948c", "#30698e", "#433e85", "#440154")
"""Young to old: steps of viridis, from bright to dark."""

DARK = {
    INK: "#e6edf3", MUTED: "#9198a1", GRID: "#30363d", SURFACE: "#0d1117",
    BLUE: "#4aa3e0", ORANGE: "#f0b429", VERMILION: "#ff7b39", GREEN: "#2fc79a", PURPLE: "#dd95bd",
    SKY: "#8fd0f7", OCHRE: "#c9a227",
} | dict(zip(AGES, ("#3b528b", "#2c718e", "#21918c", "#28ae80", "#84d44b", "#fde725"), strict=True))  # fmt: skip
"""Colour on a light page -> the colour that takes its place on a dark one."""

_PREFERRED = {"m2po": BLUE, "grpo": ORANGE, "grpo_no_tr": VERMILION, "gspo": PURPLE, "m2po_clip": GREEN}
_PALETTE = (BLUE, ORANGE, VERMILION, GREEN, PURPLE, SKY, OCHRE)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True)
class Style:
    """How an arm is drawn everywhere."""

    color: str
    dashes: Any

    @property
    def line(self) -> dict[str, Any]:
        """Keywords of a matplotlib line."""
        return {"color": self.color, "linestyle": self.dashes, "linewidth": 1.8, "solid_capstyle": "round"}


def styles(runs: Sequence[RunData]) -> dict[str, Style]:
    """Arm -> style: the first on-policy arm in dashed ink, objectives in their own colour, then what is left."""
    chosen: dict[str, Style] = {}
    for name, members in arms(runs).items():
        config, taken = members[0].config, [style.color for style in chosen.values()]
        if config.staleness.k == 0 and INK not in taken:
            chosen[name] = Style(INK, _DASHES[1])
            continue
        wanted = _PREFERRED.get(config.objective.name)
        free = [color for color in (wanted, *_PALETTE) if color and color not in taken]
        color = free[0] if free else _PALETTE[len(chosen) % len(_PALETTE)]
        chosen[name] = Style(color, _DASHES[taken.count(color) % len(_DASHES)])
    return chosen


def dress(axes: Axes, title: str, *, xlabel: str = "", ylabel: str = "") -> None:
    """Give a panel the shared look: title on the left, light horizontal grid, no frame but the base line."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=8)
    axes.set_xlabel(xlabel, fontsize=9.5, color=MUTED)
    axes.set_ylabel(ylabel, fontsize=9.5, color=MUTED)
    axes.set_facecolor("none")
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(MUTED)
