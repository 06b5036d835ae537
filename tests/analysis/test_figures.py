"""Figures: what is drawn, where it stands, and that nothing is drawn over an absence."""

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from m2po_jax import rollouts
from m2po_jax.analysis import figures, palette
from m2po_jax.analysis.frames import RunData, find_runs, load
from m2po_jax.analysis.report import FIGURES
from tests.analysis import synthetic
from tests.analysis.synthetic import make_run


@pytest.fixture(scope="module")
def runs(sweep: Path) -> list[RunData]:
    return [load(path) for path in find_runs([sweep])]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())
def test_png_has_the_figure_s_size_and_is_not_blank(draw: Callable, runs: list[RunData]):
    figure = draw(runs)
    pixels = imread(io.BytesIO(figures.png(figure)))
    width, height = np.round(figure.get_size_inches() * figures.PNG_DPI)
    assert pixels.shape[:2] == (height, width)
    ink = (pixels[:, :, :3] < 0.9).any(axis=2).mean()
    assert 0.01 < ink < 0.4, "drawn on, and mostly white"


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())
def test_every_arm_is_named(draw: Callable, runs: list[RunData]):
    figure = draw(runs)
    named = texts(figure) + [axes.get_title(loc="left") for axes in figure.axes]
    assert {"grpo-s0", "m2po-s256"} <= set(named)


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())
def test_a_run_without_anything_yet_is_drawn_as_an_absence(draw: Callable, tmp_path: Path):
    synthetic.start_run(tmp_path / "run", synthetic.config_of("m2po-s256"))
    figure = draw([load(tmp_path / "run")])
    assert any(text.startswith("no ") for text in texts(figure))
    assert len(figures.png(figure)) > 1000


@pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES.keys())
def test_numbers_that_are_not_finite_leave_gaps(draw: Callable, tmp_path: Path):
    store = make_run(tmp_path / "run", "m2po-s256")
    nothing = dict.fromkeys(("reward_mean", "masked_frac", "m2_trust_region", "m2_kept"), float("nan"))
    rollouts.write_segment(store, 32, [synthetic.update_line(n, **nothing) for n in range(32, 64)])
    columns = synthetic.diagnostics(40, 3, 50, 0.1)
    columns["log_ratio"][:10] = np.nan
    rollouts.write_diagnostics(store, 40, columns)
    assert len(figures.png(draw([load(tmp_path / "run")]))) > 1000


def test_curves_pass_through_the_mean_of_the_seeds(runs: list[RunData]):
    upper, lower = figures.learning_curves(runs).axes
    line = next(line for line in upper.lines if to_hex(line.get_color()) == palette.INK)
    np.testing.assert_allclose(line.get_xdata(), [0, 16, 32, 48, 64])
    np.testing.assert_allclose(line.get_ydata(), 0.3 + 0.41 * np.arange(5) / 4)
    rewards = next(line for line in lower.lines if to_hex(line.get_color()) == palette.INK)
    np.testing.assert_allclose(rewards.get_ydata(), 0.3 + 0.41 * (np.arange(16) * 4 + 1.5) / 64)


def test_a_circle_stands_where_the_initial_phase_ends(runs: list[RunData]):
    upper = figures.learning_curves(runs).axes[0]
    circles = [line for line in upper.lines if line.get_marker() == "o"]
    assert [(line.get_xdata()[0], to_hex(line.get_markeredgecolor())) for line in circles] == [(32, palette.BLUE)]
    assert circles[0].get_ydata()[0] == pytest.approx(0.3 + 0.31 / 2)
    assert any("until update 32" in text.get_text() for text in upper.texts)


def test_no_initial_phase_is_shaded_without_one(runs: list[RunData]):
    on_policy = [run for run in runs if run.name == "grpo-s0"]
    assert not any("base policy" in text for text in texts(figures.learning_curves(on_policy)))


def test_an_unfinished_arm_says_so_and_ends_in_a_cross(runs: list[RunData], tmp_path: Path):
    make_run(tmp_path / "run", "grpo-s256", updates=32)
    figure = figures.learning_curves([*runs, load(tmp_path / "run")])
    assert "grpo-s256 (unfinished)" in texts(figure)
    crosses = [line for line in figure.axes[0].lines if line.get_marker() == "x"]
    assert [line.get_xdata()[0] for line in crosses] == [32]


def test_zero_is_on_the_scale_of_masked_fractions(tmp_path: Path):
    store, _ = synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    lines = [synthetic.update_line(n, masked_frac=0.0) for n in range(64)]
    rollouts.write_segment(store, 0, lines)
    axes = figures.masked_fraction([load(tmp_path / "run")]).axes[0]
    low, high = axes.get_ylim()
    assert low < 0 < 0.1 <= high
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), np.zeros(16))
    assert axes.yaxis.get_major_formatter()(0.001, None) == "0.1%"
    assert axes.yaxis.get_major_formatter()(0.0, None) == "0%"


def test_threshold_is_drawn_where_the_objective_has_one(runs: list[RunData]):
    by_arm = dict(zip(("grpo-s0", "m2po-s256"), figures.second_moment(runs).axes, strict=True))
    drawn = {arm: [text.get_text() for text in axes.texts] for arm, axes in by_arm.items()}
    assert drawn == {"grpo-s0": [], "m2po-s256": ["τ = 0.04"]}
    other = runs[-1].config.objective
    changed = replace(
        runs[-1], config=replace(runs[-1].config, objective=replace(other, hyperparameters={"threshold": 0.1}))
    )
    assert texts(figures.second_moment([changed])) == ["τ = 0.1"]


def test_histogram_is_a_density_by_age(runs: list[RunData]):
    run = [run for run in runs if run.name == "m2po-s256"][:1]
    axes = figures.log_ratio_histogram(run).axes[0]
    assert [patch.get_label() for patch in axes.patches] == ["0", "1–3"]
    for patch in axes.patches:
        density, edges, _ = patch.get_data()
        assert np.nansum(density * np.diff(edges)) == pytest.approx(1.0, abs=0.011)
    assert any(text.startswith("400 tokens") for text in texts(axes.figure))


def test_tokens_beyond_the_range_are_counted(tmp_path: Path):
    store, _ = synthetic.start_run(tmp_path / "run", synthetic.config_of("grpo-s0"))
    columns = synthetic.diagnostics(0, 300, 10_000, 0.1)
    columns["log_ratio"][:3] = 50.0
    rollouts.write_diagnostics(store, 0, columns)
    figure = figures.log_ratio_histogram([load(tmp_path / "run")])
    limit = figure.axes[0].get_xlim()[1]
    beyond = int((np.abs(columns["log_ratio"]) > limit).sum())
    assert 3 <= beyond <= 10
    assert f"10,000 tokens\n{beyond:,} beyond the range" in texts(figure)


def test_styles_are_distinct_and_give_the_reference_ink(tmp_path: Path):
    arms = []
    for place in range(12):
        config = replace(synthetic.config_of("grpo-s0" if place == 0 else "grpo-s256"), name=f"arm{place}")
        synthetic.start_run(tmp_path / f"{place:02d}", config)
        arms.append(load(tmp_path / f"{place:02d}"))
    chosen = palette.styles(arms)
    assert chosen["arm0"].color == palette.INK
    assert len({(style.color, style.dashes) for style in chosen.values()}) == 12
    assert len(figures.png(figures.second_moment(arms))) > 1000


@given(heights=st.dictionaries(st.text("abcdefgh", min_size=1), st.floats(0, 1), max_size=8), gap=st.floats(0.01, 0.3))
def test_labels_keep_their_order_and_distance(heights: dict[str, float], gap: float):
    spread = figures._spread(heights, gap)
    assert spread.keys() == heights.keys()
    order = sorted(heights, key=heights.__getitem__)
    steps = np.diff([spread[name] for name in order])
    assert (steps >= gap * (1 - 1e-9)).all()
    if heights:
        assert np.mean(list(spread.values())) == pytest.approx(np.mean(list(heights.values())))


def test_labels_that_do_not_touch_stay():
    assert figures._spread({"a": 0.1, "b": 0.5, "c": 0.52}, 0.1) == pytest.approx({"a": 0.1, "b": 0.46, "c": 0.56})


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], None, ""),
        ([0, 1], None, "▁█"),
        ([1, 2, 3, 4, 5, 6, 7, 8], None, "▁▂▃▄▅▆▇█"),
        ([5, 5, 5], None, "▁▁▁"),
        ([0, float("nan"), 1, float("inf")], None, "▁ █ "),
        ([float("nan")], None, " "),
        ([0, 0, 1, 1], 2, "▁█"),
        ([0, 0, float("nan"), float("nan"), 1, 1], 3, "▁ █"),
        ([0, 1], 10, "▁█"),
    ],
)
def test_sparkline(values, width, drawn):
    assert figures.sparkline(values, width) == drawn


def test_svg_is_reproducible_and_self_contained(runs: list[RunData]):
    first, second = (figures.svg(figures.learning_curves(runs)) for _ in range(2))
    assert first == second
    assert first.startswith("<svg") and first.rstrip().endswith("</svg>")
    assert "m2po-s256</text>" in first, "text stays text"
