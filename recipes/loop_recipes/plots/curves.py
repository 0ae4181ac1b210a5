"""Draws pictures of training runs, from their metrics.jsonl alone, as PNG and SVG.

    loop plot runs/demo
    loop plot LOOP=runs/seed0,runs/seed1,runs/seed2 shuffled=runs/control --out runs/figures
    loop plot --rollouts runs/demo --task 692c77d_1
    loop plot --slots lag=runs/lag stream=runs/stream

Each argument is a curve: ``[label=]RUN[,RUN...]``, where several runs are seeds of one setting and become a mean with a
band. A run is its output folder or a metrics.jsonl; `METRICS` in loop_recipes/run/metrics.py explains the keys. With
``--rollouts`` the pictures show the agents' behaviour, with ``--slots`` the episodes that ran and waited.
"""

from __future__ import annotations

import math
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from agent_environments.description import BehaviorFigure
from loop_formats.places import labelled_paths, split_label
from loop_formats.run_folder import read_description, read_metrics
from loop_plumbing.plug_ins import load_part
from loop_recipes.config.arguments import verb_parser
from loop_recipes.plots.style import COLOURS, MARKS, lowest, panels, save

PHASES = {
    "seconds_waiting": "waiting for rollouts",
    "seconds_recomputing": "recomputing log-probs",
    "seconds_updating": "updating",
    "seconds_publishing": "publishing the policy",
}

TRAINING = {
    "loss": "loss",
    "held_out_loss": "held-out loss",
    "grad_norm": "gradient norm",
    "entropy": "entropy, nats a token",
    "entropy_estimate": "entropy as sampled, nats a token",
    "approx_kl": "KL to the sampling policy, nats a token",
    "reference_kl": "KL to the base model",
    "learning_rate": "learning rate",
}

PLANNED = {"learning_rate"}
"""Figures of :data:`TRAINING` that are not measurements, and so have no average."""
AVERAGED = 5
"""Iterations that the moving average of a curve covers."""
FEWEST_AVERAGED = 10
"""Fewest iterations of a curve with a moving average; with fewer it would be little more than one number."""
CERTAIN = 1.96
"""Standard errors to either side that make an interval of 95 %."""
LEGEND_IN = (3.0, 0.18)
"""Inches that a name takes below panels: its column, its row."""
LETTERS_PER_INCH = 13
"""Letters of a note above the panels."""
MOST_MARKED = 30
"""Most iterations of a line without an average whose points are marked."""


@dataclass(frozen=True)
class Curve:
    """A setting: a label and the metrics of its runs (seeds), each a list of lines in the order of iterations.

    ``figures`` are the environment's figures of behaviour.
    """

    label: str
    runs: list[list[dict[str, Any]]]
    figures: Sequence[BehaviorFigure] = ()

    @property
    def whole_until(self) -> int:
        """Return the last iteration that every run has."""
        return min(max(line["iteration"] for line in run) for run in self.runs)

    @property
    def datasets(self) -> set[str]:
        return {str(line["dataset"]) for run in self.runs for line in run if "dataset" in line}

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (iterations [i], values [runs, i]) of a key; NaN for a missing value."""
        rows = [{line["iteration"]: line[key] for line in run if _number(line.get(key))} for run in self.runs]
        known = sorted(set().union(*rows))
        return np.array(known), np.array([[row.get(each, np.nan) for each in known] for row in rows], dtype=float)


def parse_curves(texts: Sequence[str]) -> list[Curve]:
    """Read each ``[label=]RUN[,RUN...]``; the default label is the distinct part of the first run's path. Runs without
    a finished iteration are left out and named on standard error.

    Raises:
        ValueError: no run has metrics, metrics cannot be read, or a curve has the same run twice.
    """
    curves, empty = [], []
    for label, paths in labelled_paths(texts):
        metrics = {path: read_metrics(path) for path in paths}
        empty += [str(path) for path, lines in metrics.items() if not lines]
        if runs := {path: lines for path, lines in metrics.items() if lines}:
            curves.append(Curve(label, [*runs.values()], read_description(next(iter(runs))).figures))
    if not curves:
        raise ValueError(f"{', '.join(empty)}: no iteration has ended yet, so there is nothing to draw")
    if empty:
        print(f"loop plot: {', '.join(empty)}: no iteration has ended yet, left out", file=sys.stderr)
    return curves


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving average over ``window`` iterations, [runs, i], without NaNs; NaN at both ends, if the
    window is incomplete. An even window has one more iteration after the centre than before."""
    before, averaged = (window - 1) // 2, np.full_like(values, np.nan)
    for first in range(values.shape[1] - window + 1):
        averaged[:, first + before] = _nan_mean(values[:, first : first + window], axis=1)
    return averaged


def draw(axes: Axes, curve: Curve, key: str, colour: str, window: int = AVERAGED, label: str | None = None) -> bool:
    """Draw one key of one curve; returns False if no run has the key.

    Each iteration is a point: for a single run its value, with an interval of 95 % over tasks where the metrics have an
    error; for several runs their mean, with a band from the lowest to the highest. From :data:`FEWEST_AVERAGED`
    iterations on the line is their average over ``window``. After the end of the shortest seed the line is dotted: a
    step there means nothing.
    """
    iterations, values = curve.series(key)
    if not len(iterations):
        return False
    name, window = label or curve.label, window if len(iterations) >= FEWEST_AVERAGED else 1
    smoothed = smooth(values, window)
    mean, points, of_all = _nan_mean(smoothed, axis=0), _nan_mean(values, axis=0), iterations <= curve.whole_until
    if len(curve.runs) > 1:
        there, band = iterations[~np.isnan(mean)], smoothed[:, ~np.isnan(mean)]
        axes.fill_between(there, np.nanmin(band, 0), np.nanmax(band, 0), color=colour, alpha=0.18, lw=0)
    measured, errors = curve.series(f"{key}_error")
    if len(measured) and len(curve.runs) == 1:
        here = np.interp(measured, iterations, points)
        axes.errorbar(measured, here, CERTAIN * errors[0], ls="", color=colour, alpha=0.35, lw=1)
    if window > 1:
        points_alone = MARKS[colour] | {"ls": "", "ms": 4, "mew": 0, "alpha": 0.45}
        axes.plot(iterations, points, color=colour, label=f"{name}: each", **points_alone)
    marks = MARKS[colour] if window == 1 and of_all.sum() <= MOST_MARKED else {"ls": MARKS[colour]["ls"]}
    named = f"{name}: average of {window}" if window > 1 else name
    axes.plot(iterations[of_all], mean[of_all], color=colour, lw=2, ms=4, label=named, **marks)
    if (rest := iterations >= curve.whole_until).sum() > 1:
        axes.plot(iterations[rest], mean[rest], color=colour, lw=1, ls=":")
    return True


def learning_curve(curves: Sequence[Curve]) -> Figure:
    """Plot reward and success over iterations; diamonds are evaluations on dev tasks. If there are too many curves for
    one panel, each has its own."""
    apart, titles = len(curves) > len(COLOURS), {"reward": "mean reward", "success": "share of rollouts that solve"}
    lines = [line for curve in curves for run in curve.runs for line in run]
    if all(line.get(f"{of}reward") == line.get(f"{of}success") for line in lines for of in ("", "dev_")):
        titles = {"success": "mean reward, equal to the share that solve"}
    figure, grid = panels(len(curves) if apart else len(titles), 15.0 if apart else 20.0, sharex=True)
    for place, (key, title) in enumerate(titles.items()):
        for number, curve in enumerate(curves):
            axes, colour = grid.flat[number if apart else place], _colour(place if apart else number)
            label, scale = (title, "0 to 1") if apart else (curve.label, f"{key}, 0 to 1")
            draw(axes, curve, key, colour, label=label)
            evaluated, values = _dev_scores(curve, key)
            if values.size:
                axes.plot(evaluated, values, "D--", color=colour, ms=5, lw=1, label=f"{label}, dev")
            axes.set(title=curve.label if apart else title, ylabel=scale, ylim=(-0.02, 1.02))
    seeds = " or ".join(map(str, sorted({len(curve.runs) for curve in curves} - {1})))
    notes = [_averaged(curves, "reward")]
    notes += [f"band: lowest to highest of {seeds} seeds"] if seeds else []
    alone = [curve for curve in curves if len(curve.runs) == 1 and len(curve.series("reward_error")[0])]
    notes += ["bars: 95% interval over tasks, cut at 0 and 1"] if alone else []
    notes += _counted(curves)
    return _finish_panels(figure, grid, curves, "; ".join(filter(None, notes)))


def _counted(curves: Sequence[Curve]) -> list[str]:
    """Describe the number of rollouts per iteration, if the metrics have it."""
    counts = [
        line["rollouts"] for curve in curves for run in curve.runs for line in run if _number(line.get("rollouts"))
    ]
    ends = sorted({min(counts), max(counts)}) if counts else []
    return [f"{' to '.join(map(str, ends))} rollouts an iteration"] * bool(ends)


def _averaged(curves: Sequence[Curve], key: str) -> str:
    """Describe the moving average; "" if there is none."""
    if all(len(curve.series(key)[0]) < FEWEST_AVERAGED for curve in curves):
        return ""
    return f"average: over {AVERAGED} iterations, as many before as after"


def _dev_scores(curve: Curve, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return (iterations of the scored policies [i], scores [i]), means over the runs."""
    whens = ("", "earlier_")  # a run's last line may have two scores
    series = [[_nan_mean(curve.series(f"{when}dev_{name}")[1], 0) for when in whens] for name in ("iteration", key)]
    evaluated, values = (np.concatenate(arrays) for arrays in series)
    order = np.argsort(evaluated)
    order = order[evaluated[order] <= curve.whole_until]  # beyond it are scores of some seeds only
    return evaluated[order], values[order]


def phases(curves: Sequence[Curve]) -> Figure:
    """Plot the seconds of an iteration by phase, stacked; for the first seed of each curve."""
    figure, grid = plt.subplots(1, len(curves), figsize=(max(6, 5 * len(curves)), 4), squeeze=False, sharey=True)
    for axes, curve in zip(grid[0], curves, strict=True):
        run = curve.runs[0]
        iterations = np.array([line["iteration"] for line in run])
        bottom = np.zeros(len(run))
        for number, (key, label) in enumerate(PHASES.items()):
            seconds = np.array([float(line.get(key) or 0.0) for line in run])
            axes.bar(iterations, seconds, 0.9, bottom=bottom, color=_colour(number), label=label)
            bottom += seconds
        total = np.array([float(line.get("seconds") or 0.0) for line in run])
        axes.bar(iterations, np.maximum(total - bottom, 0), 0.9, bottom=bottom, color=COLOURS[-1], label="other")
        axes.set(title=curve.label, xlabel="iteration", ylabel="seconds")
    grid[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return _finish(figure, curves, "time per iteration")


def lag_and_gap(curves: Sequence[Curve]) -> Figure:
    """Plot how far training is off-policy: policy lag unless it is always 0, sampler-learner gap, clip fraction, spread
    of the ratio."""
    lags = [curve.series("policy_lag")[1] for curve in curves]
    lagged = any(np.nansum(values) for values in lags)
    shape, size = ((2, 2), (10, 8)) if lagged else ((1, 3), (13, 4.5))
    figure, grid = plt.subplots(*shape, figsize=size, sharex=True, squeeze=False)
    lag, (gap, clip, ratio) = grid.flat[0], grid.flat[-3:]
    for number, curve in enumerate(curves):
        colour = _colour(number)
        iterations, values = curve.series("policy_lag")
        if lagged and len(iterations):
            lag.step(iterations, np.nanmax(values, axis=0), where="mid", color=colour, label=curve.label)
        draw(clip, curve, "clip_fraction", colour)
        draw(gap, curve, "gap_p99", colour, 1)
        iterations, values = curve.series("gap_max")
        if len(iterations):
            gap.plot(iterations, np.nanmax(values, axis=0), color=colour, ls=":", lw=1)
        draw(ratio, curve, "ratio_p50", colour, 1)
        iterations, low = curve.series("ratio_p01")
        _, high = curve.series("ratio_p99")
        if len(iterations) and low.shape == high.shape:
            ratio.fill_between(iterations, np.nanmin(low, 0), np.nanmax(high, 0), color=colour, alpha=0.18, lw=0)
    if lagged:
        lag.set(title="policy lag", ylabel="versions", ylim=(-0.1, max(1.1, lag.get_ylim()[1])))
        lag.yaxis.get_major_locator().set_params(integer=True)
    scale = "log" if math.isfinite(gap.dataLim.minposy) else "linear"  # of zeros there is no logarithm
    gap.set(title="log-probs: sampler against learner", ylabel="99th percentile (dotted: largest), nats", yscale=scale)
    if scale == "log":
        gap.yaxis.set(major_formatter=LogFormatter(), minor_formatter=LogFormatter())
    clip.set(title="clipped tokens", ylabel="share of tokens")
    _from_zero(clip)
    ratio.set(title="importance ratio", ylabel="median, 1st to 99th percentile")
    recorded = any(values.size for values in lags)
    return _finish_panels(figure, grid, curves, "policy lag: always 0" if recorded and not lagged else "")


def behavior(curves: Sequence[Curve]) -> Figure:
    """Plot the environment's figures of behaviour over iterations."""
    titles = {"turns": "turns per rollout"}  # also of rollouts without texts
    known = [
        each for curve in curves for each in curve.figures if each.name != "turns" and len(curve.series(each.key)[0])
    ]
    titles |= {each.key: each.title for each in known}
    figure, grid = panels(len(titles), sharex=True)
    for axes, (key, title) in zip(grid.flat, titles.items(), strict=False):
        drawn = [draw(axes, curve, key, _colour(number)) for number, curve in enumerate(curves)]
        axes.set_title(title, fontsize=10)
        _from_zero(axes)
        if not any(drawn):
            axes.text(0.5, 0.5, "not recorded", transform=axes.transAxes, ha="center", color="#666666")
    notes = ["behaviour of the rollouts trained on", _averaged(curves, "turns")]
    return _finish_panels(figure, grid, curves, "; ".join(filter(None, notes)))


def training(curves: Sequence[Curve]) -> Figure:
    """Plot loss, gradient, entropy, KL and learning rate; skip quantities that no run has."""
    known = [each for each in TRAINING.items() if any(len(curve.series(each[0])[0]) for curve in curves)]
    figure, grid = panels(len(known), sharex=True)
    for axes, (key, title) in zip(grid.flat, known, strict=False):
        for number, curve in enumerate(curves):
            draw(axes, curve, key, _colour(number), *((1, "_") if key in PLANNED else ()))
        axes.set_title(title, fontsize=10)
        _from_zero(axes)
    return _finish_panels(figure, grid, curves, _averaged(curves, "loss"))


FIGURES: dict[str, Callable[[Sequence[Curve]], Figure]] = {
    "learning_curve": learning_curve,
    "training": training,
    "time_per_phase": phases,
    "lag_and_gap": lag_and_gap,
    "behavior": behavior,
}


def write_figures(curves: Sequence[Curve], output: Path, title: str | None = None) -> list[Path]:
    """Write every figure into ``output`` as PNG and SVG; returns the paths. ``title`` stands above each figure, in
    place of the dataset's name; the explanation of the lines stands below it."""
    written = []
    for name, make in FIGURES.items():
        figure = make(curves)
        if title is not None:
            notes = figure.get_suptitle().split("\n")[1:]
            figure.suptitle("\n".join([title, *notes]), fontsize=10, x=0.01, ha="left")
        written += save(figure, output, name)
    return written


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = verb_parser("plot", __doc__)
    parser.add_argument("curves", nargs="+", metavar="[LABEL=]RUN[,RUN...]", help="a setting and its runs (seeds)")
    parser.add_argument("--out", type=Path, help="folder for the pictures (default: that of the first run)")
    parser.add_argument("--title", help="title of each picture (default: the dataset's name)")
    parser.add_argument("--rollouts", action="store_true", help="draw a run's or an evaluation's rollouts instead")
    parser.add_argument("--slots", action="store_true", help="draw the use of the node's slots over time instead")
    parser.add_argument("--task", help="with --rollouts: draw API calls of this task (default: most rollouts)")
    parsed = parser.parse_args(arguments)
    first = split_label(parsed.curves[0])[1][0]
    output = parsed.out or (first if first.is_dir() else first.parent)
    try:
        if parsed.rollouts:
            written = load_part("rollout_figures")(first, output, parsed.task)
        elif parsed.slots:
            from loop_recipes.plots.slots import slots_over_time  # few calls need it

            written = save(slots_over_time(parsed.curves), output, "slots")
        else:
            written = write_figures(parse_curves(parsed.curves), output, parsed.title)
    except (ValueError, OSError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    print(*written, sep="\n")
    return 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _nan_mean(values: np.ndarray, axis: int) -> np.ndarray:
    """Average the values without NaNs; the result is NaN, without a warning, if all values are NaN."""
    present = ~np.isnan(values)
    count = present.sum(axis=axis)
    total = np.where(present, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _finish_panels(figure: Figure, grid: np.ndarray, curves: Sequence[Curve], note: str) -> Figure:
    """Finish panels with the same curves like :func:`_finish`, and put one legend below all panels."""
    for axes in lowest(grid):
        axes.set_xlabel("iteration")
    legends = [axes.get_legend_handles_labels() for axes in grid.flat]
    named = {label: handle for handles, labels in legends for handle, label in zip(handles, labels, strict=True)}
    columns = max(1, int(figure.get_figwidth() / LEGEND_IN[0]))
    figure.legend(named.values(), named.keys(), frameon=False, fontsize=8, loc="lower left", ncols=columns)
    below = LEGEND_IN[1] * (1 + math.ceil(len(named) / columns))
    figure.set_figheight(figure.get_figheight() + below)
    return _finish(figure, curves, note, below)


def _from_zero(axes: Axes) -> None:
    """Let the y axis begin at zero, unless a value is below it, and keep some room above the data."""
    low, high = axes.get_ylim()
    axes.set_ylim(low if axes.dataLim.ymin < 0 else 0, high + 0.05 * abs(high))


def _finish(figure: Figure, curves: Sequence[Curve], note: str, below: float = 0.0) -> Figure:
    """Print the dataset's name, so that curves of different datasets are not confused.

    Args:
        below: inches to leave free at the lower edge.
    """
    datasets = ", ".join(sorted(set().union(*(curve.datasets for curve in curves)))) or "dataset not recorded"
    ended = [curve.label for curve in curves if any(run[-1]["iteration"] > curve.whole_until for run in curve.runs)]
    if ended:
        note = "; ".join([note] * bool(note) + [f"dotted: seeds of {', '.join(ended)} that go on after others ended"])
    lines = textwrap.wrap(note, int(figure.get_figwidth() * LETTERS_PER_INCH))
    figure.suptitle("\n".join([datasets, *lines]), fontsize=10, x=0.01, ha="left")
    for axes in figure.axes:
        axes.grid(alpha=0.25, lw=0.5)
        axes.locator_params(axis="x", integer=True)
        axes.set_xmargin(0.02)  # an iteration 0 that nothing measured has no place
    figure.tight_layout(rect=(0.0, below / figure.get_figheight(), 1.0, 1.0))
    return figure
