"""Pictures from metrics.jsonl alone: what they hold, not only that they are there."""

import json

import numpy as np
import pytest
from matplotlib.axes import Axes

from agent_environments.description import OWN_BEHAVIOR, TOOLS_BEHAVIOR, Description
from loop_formats.run_files import meta_path, write_rollouts
from loop_formats.run_folder import read_metrics, write_description
from loop_recipes.plots.curves import (
    FIGURES,
    Curve,
    behavior,
    lag_and_gap,
    learning_curve,
    main,
    parse_curves,
    phases,
    smooth,
    training,
)
from loop_recipes.plots.slots import slots_over_time
from loop_recipes.verbs.doctor import main as doctor
from loop_recipes.verbs.view import main as view
from support.rollouts import rollout, turn
from support.texts import texts_beside

TABLES = texts_beside(__file__)


def parse_curve(text):
    return parse_curves([text])[0]


def write_run(folder, rewards, **more):
    folder.mkdir(parents=True)
    lines = [
        {"iteration": number, "dataset": "synthetic-x", "reward": reward, "success": reward / 2, "turns": 5.0, **more}
        for number, reward in enumerate(rewards, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_every_figure_is_written_as_png_and_svg(tmp_path, capsys):
    run = write_run(tmp_path / "demo", [0.1, 0.5, 0.9], seconds=2.0, seconds_updating=1.0, gap_p99=1e-4, policy_lag=0)
    assert main([str(run)]) == 0
    printed = capsys.readouterr().out.split()
    assert sorted(printed) == sorted(str(run / f"{name}.{kind}") for name in FIGURES for kind in ("png", "svg"))
    assert (run / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    svg = (run / "learning_curve.svg").read_text()
    assert "synthetic-x" in svg
    assert "mean reward" in svg
    assert sorted(path.name for path in run.iterdir() if path.name.startswith(".")) == []


def test_pictures_are_reproducible(tmp_path):
    run = write_run(tmp_path / "demo", [0.1, 0.5, 0.9])
    for output in ("a", "b"):
        assert main([str(run), "--out", str(tmp_path / output)]) == 0
    for name in FIGURES:
        assert (tmp_path / f"a/{name}.svg").read_text() == (tmp_path / f"b/{name}.svg").read_text()


def test_seeds_become_a_mean_and_a_band(tmp_path):
    runs = [write_run(tmp_path / f"seed{seed}", [0.2 + 0.1 * seed] * 4) for seed in range(3)]
    curve = parse_curve("LOOP=" + ",".join(map(str, runs)))
    axes = learning_curve([curve]).axes[0]
    (line,) = axes.get_lines()
    assert line.get_ydata() == pytest.approx([0.3] * 4)
    assert line.get_label() == "LOOP"
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == pytest.approx((0.2, 0.4))


@pytest.mark.fault("a mean of seeds of which one has ended")
def test_the_mean_is_dotted_where_a_seed_has_ended(tmp_path):
    runs = [write_run(tmp_path / "a", [0.0, 0.0, 0.0]), write_run(tmp_path / "b", [1.0])]
    curve = parse_curve("x=" + ",".join(map(str, runs)))
    figure = learning_curve([curve])
    lines = figure.axes[0].get_lines()
    assert [(line.get_linestyle(), list(line.get_ydata())) for line in lines] == [("-", [0.5]), (":", [0.5, 0.0, 0.0])]
    assert "dotted: seeds of x that go on after others ended" in figure._suptitle.get_text()
    whole = parse_curve(f"x={runs[0]},{write_run(tmp_path / 'c', [0.0, 0.0, 0.0])}")
    figure = learning_curve([whole])
    assert len(figure.axes[0].get_lines()) == 1
    assert "dotted" not in figure._suptitle.get_text()


NAMES = TABLES["names"]


@pytest.mark.fault("a run whose path has = or , in it")
@pytest.mark.parametrize(("name", "text", "label"), NAMES)
def test_a_path_that_exists_is_that_path(tmp_path, capsys, name, text, label):
    run = write_run(tmp_path / name, [0.1, 0.2])
    curve = parse_curve(text.format(run))
    assert (curve.label, len(curve.runs)) == (label, 1)
    assert main([text.format(run)]) == 0
    assert (run / "learning_curve.png").exists()
    two = parse_curve(f"x={run},{write_run(tmp_path / 'other', [0.3])}")
    assert (two.label, [len(lines) for lines in two.runs]) == ("x", [2, 1])


@pytest.mark.fault("two curves with the same label")
def test_curves_are_called_by_what_tells_them_apart(tmp_path):
    runs = [write_run(tmp_path / kind / "seed0", [0.1]) for kind in ("loop", "grpo")]
    assert [curve.label for curve in parse_curves(list(map(str, runs)))] == ["loop", "grpo"]
    files = [str(run / "metrics.jsonl") for run in runs]
    assert [curve.label for curve in parse_curves(files)] == ["loop", "grpo"]
    assert [curve.label for curve in parse_curves([files[0], f"mine={files[1]}"])] == ["loop", "mine"]


def test_a_dev_score_stands_where_its_policy_stood():
    lines = [{"iteration": number, "reward": 0.5, "success": 0.25} for number in (1, 2, 3)]
    lines[0] |= {"dev_iteration": 0, "dev_reward": 0.1, "dev_success": 0.0}
    lines[2] |= {"dev_iteration": 3, "dev_reward": 0.9, "dev_success": 0.6}
    lines[2] |= {"earlier_dev_iteration": 2, "earlier_dev_reward": 0.7, "earlier_dev_success": 0.4}
    _, diamonds = learning_curve([Curve("LOOP", [lines])]).axes[0].get_lines()
    assert diamonds.get_label() == "LOOP, dev"
    assert (list(diamonds.get_xdata()), list(diamonds.get_ydata())) == ([0, 2, 3], [0.1, 0.7, 0.9])


def test_smoothing_is_a_centred_average():
    values = np.array([[0.0, 3.0, 6.0, np.nan, 2.0]])
    assert np.array_equal(smooth(values, 3), [[np.nan, 3.0, 4.5, 4.0, np.nan]], equal_nan=True), "a whole window"
    assert np.array_equal(smooth(np.array([[0.0, 2.0, 4.0, 8.0]]), 2), [[1.0, 3.0, 6.0, np.nan]], equal_nan=True)


def test_phases_stack_to_the_whole_iteration(tmp_path):
    run = write_run(tmp_path / "r", [0.5], seconds=10.0, seconds_waiting=4.0, seconds_updating=3.0)
    axes = phases([parse_curve(str(run))]).axes[0]
    heights = {each.get_label(): each[0].get_height() for each in axes.containers if each[0].get_height()}
    assert heights == {"waiting for rollouts": 4.0, "updating": 3.0, "other": 3.0}


def test_the_behaviour_that_is_drawn_is_what_was_recorded(tmp_path):
    """Nothing is drawn but the figures of the environment that a run names."""
    keys = {"behavior_dummy": 0.5, "tool_calls": 2.0}
    runs = [write_run(tmp_path / "silent", [0.5, 0.6]), *(write_run(tmp_path / n, [0.5], **keys) for n in "ab")]
    write_description(runs[1], Description(name="both", behavior=OWN_BEHAVIOR))
    write_description(runs[2], Description(name="mine", behavior=(TOOLS_BEHAVIOR,)))
    titles = [[axes.get_title() for axes in behavior([parse_curve(str(run))]).axes] for run in runs]
    turns, dummy, calls = "turns per rollout", "'dummy' per rollout", "tool calls per rollout"
    assert titles == [[turns], [turns, dummy, calls], [turns, calls]]
    (axes,) = behavior([Curve("no turns", [[{"iteration": 1}]])]).axes
    assert [text.get_text() for text in axes.texts] == ["not recorded"]


def test_a_line_cut_short_is_left_out_and_a_damaged_one_named(tmp_path, capsys):
    run = write_run(tmp_path / "r", [0.5, 0.6])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')
    curve = parse_curve(str(run))
    assert len(curve.runs[0]) == 2
    with (file := run / "metrics.jsonl").open("a") as lines:
        lines.write('ard": 0.7}\n{"reward": 0.7}\n')
    assert main([str(run)]) == 1
    assert capsys.readouterr().err == f"loop plot: {file}:4 is not a line of metrics: it has no iteration\n"


def test_what_cannot_be_drawn_or_written_is_one_clear_line(tmp_path, capsys):
    run = write_run(tmp_path / "demo", [0.1, 0.5])
    (tmp_path / "file").touch()
    assert main([str(run), "--out", str(tmp_path / "file")]) == 1
    said = "does not take pictures, give another --out: [Errno 17] File exists"
    assert capsys.readouterr().err == f"loop plot: {tmp_path / 'file'} {said}: '{tmp_path / 'file'}'\n"


@pytest.mark.fault("one run that has only begun, and nothing is drawn")
def test_a_run_that_has_only_begun_is_named_and_the_others_are_drawn(tmp_path, capsys):
    run, empty = write_run(tmp_path / "demo", [0.1, 0.5]), tmp_path / "begun"
    empty.mkdir()
    (empty / "metrics.jsonl").touch()
    assert main([str(empty)]) == 1
    assert capsys.readouterr().err == f"loop plot: {empty}: no iteration has ended yet, so there is nothing to draw\n"
    for texts, seeds in (([f"a={empty},{run}"], [1]), ([str(run), str(empty)], [1]), ([f"{empty}", f"x={run}"], [1])):
        assert [len(curve.runs) for curve in parse_curves(texts)] == seeds
        assert capsys.readouterr().err == f"loop plot: {empty}: no iteration has ended yet, left out\n"


@pytest.mark.parametrize(("words", "meant"), TABLES["what_is_no_run_names_those_that_are_meant"])
def test_what_is_no_run_names_those_that_are_meant(tmp_path, capsys, monkeypatch, words, meant):
    for name in ("a", "b", "demo", "sweep/c"):
        write_run(tmp_path / "runs" / name, [0.1])
    (tmp_path / "runs/demo/policies").mkdir()
    for name in ("demo.py", "notes.py"):
        (tmp_path / name).write_text("TASKS = []\n")
    monkeypatch.chdir(tmp_path)
    for verb in (main, doctor, view) if "," not in words else (main,):
        if verb is not view or words not in ("runs", ".", "runs/sweep"):  # which it shows
            assert verb([words]) == 1
            error = capsys.readouterr().err
            assert error.endswith(f"; did you mean {meant.format(here=tmp_path)}?\n") if meant else "mean" not in error
            assert error.count("\n") == 1


def test_a_run_on_a_fixed_set_has_its_losses_drawn(tmp_path):
    run = write_run(tmp_path / "sft", [1.0] * 3, loss=2.0, held_out_loss=3.0, grad_norm=0.5, learning_rate=1e-3)
    shown = [axes for axes in training([parse_curve(str(run))]).axes if axes.get_visible()]
    titles = ["loss", "held-out loss", "gradient norm", "learning rate"]
    assert [axes.get_title() for axes in shown] == titles
    assert all(axes.get_xlabel() == "iteration" for axes in shown), "each is the lowest of its column"
    assert [list(axes.get_lines()[0].get_ydata()) for axes in shown] == [[2.0] * 3, [3.0] * 3, [0.5] * 3, [1e-3] * 3]


@pytest.mark.fault("an average of a few iterations, drawn where its window is not whole")
def test_points_and_average_are_named_and_few_iterations_have_no_average(tmp_path):
    rewards = [0.1, 0.5, 0.9, 0.7, 1.0, 0.6, 0.6, 0.6, 0.6, 0.0]
    for count, labels in ((9, ["run"]), (10, ["run: each", "run: average of 5"])):
        run = write_run(tmp_path / str(count) / "run", rewards[:count])
        figure = learning_curve([parse_curve(str(run))])
        axes = figure.axes[0]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == labels
        points, *average = axes.get_lines()
        assert list(points.get_ydata()) == rewards[:count], "what is first drawn is each iteration as it was"
        assert ("average: over 5 iterations" in figure.get_suptitle()) == (count == 10)
        assert axes.get_ylim()[1] > 1.0, "a reward of 1 is not cut off"
        for line in average:
            assert line.get_ydata()[2:-2] == pytest.approx([0.64, 0.74, 0.76, 0.7, 0.68, 0.48])
            assert np.isnan(line.get_ydata()[[0, 1, -2, -1]]).all()


def test_a_point_has_an_interval_over_tasks_and_the_head_says_how_many_rollouts(tmp_path):
    run = write_run(tmp_path / "run", [0.2, 0.4], reward_error=0.05, rollouts=44)
    figure = learning_curve([parse_curve(str(run))])
    (bars,) = figure.axes[0].collections
    heights = [segment[:, 1] for segment in bars.get_segments()]
    assert np.array(heights) == pytest.approx(np.array([[0.102, 0.298], [0.302, 0.498]]))
    assert not figure.axes[1].collections, "success has no error there"
    assert figure.get_suptitle().endswith("bars: 95% interval over tasks, cut at 0 and 1; 44 rollouts an iteration")


@pytest.mark.fault("the eighth and ninth curve looked like the first and second, under a legend that covered the axis")
@pytest.mark.parametrize("count", [8, 9])
def test_many_curves_can_be_told_apart_without_colour(tmp_path, count):
    curves = [parse_curve(str(write_run(tmp_path / f"run{number}", [0.1, 0.5]))) for number in range(count)]
    figure = learning_curve(curves)
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == (2 if count == 8 else count)
    lines = shown[0].get_lines()
    looks = {(str(line._dash_pattern), line.get_marker()) for line in lines}
    assert len(looks) == len(lines) == (8 if count == 8 else 2)
    figure.canvas.draw()
    bottom = min(axes.get_tightbbox().y0 for axes in shown)
    assert figure.legends[0].get_window_extent().y1 <= bottom


def test_every_axis_of_every_figure_is_named(tmp_path):
    more = {"loss": -0.01, "entropy_estimate": 0.3, "approx_kl": 1e-3, "grad_norm": 0.2, "seconds": 2.0}
    more |= {"gap_p99": 1e-4, "gap_max": 2e-4, "clip_fraction": 0.01, "policy_lag": 0}
    more |= {"ratio_p50": 1.0, "ratio_p01": 0.9, "ratio_p99": 1.1}
    curve = parse_curve(str(write_run(tmp_path / "run", [0.1] * 6, **more)))
    for make in (learning_curve, phases, lag_and_gap):
        figure = make([curve])
        figure.canvas.draw()
        for axes in figure.axes:
            assert axes.get_ylabel(), axes.get_title()
            assert axes.get_xlabel() == "iteration" or not axes.xaxis.get_tick_params()["labelbottom"]
            names = [label.get_text() for minor in (False, True) for label in axes.get_yticklabels(minor=minor)]
            assert sum(map(bool, names)) > 1
            assert not any("mathdefault" in name for name in names)
            assert figure.bbox.x1 >= axes.title.get_window_extent().x1, "a title is cut off"
    same = write_run(tmp_path / "same", [0.1] * 6, success=0.1)
    assert len(learning_curve([parse_curve(str(same))]).axes) == 1, "reward and success are equal"
    figure = training([curve])
    figure.canvas.draw()
    for axes in filter(Axes.get_visible, figure.axes):
        assert axes.title.get_window_extent().width < axes.bbox.width, "a title runs into the next one"


@pytest.mark.fault("loop plot: a quarter of a picture for a line at 0, and a note that its right edge cut off")
@pytest.mark.parametrize(("lag", "panels", "note"), [(0, 3, "policy lag: always 0"), (1, 4, "")])
def test_a_lag_that_is_always_0_has_no_panel_and_notes_are_whole(tmp_path, lag, panels, note):
    curve = parse_curve(str(write_run(tmp_path / "run", [0.1] * 12, policy_lag=lag)))
    off_policy, narrow = lag_and_gap([curve]), behavior([curve])
    assert (len(off_policy.axes), "".join(off_policy.get_suptitle().split("\n")[1:])) == (panels, note)
    narrow.canvas.draw()
    assert narrow._suptitle.get_window_extent().x1 <= narrow.bbox.x1


@pytest.mark.fault("loop plot: a quarter of a picture for a line at 0, and a note that its right edge cut off")
def test_of_panels_that_share_an_axis_the_lowest_that_is_seen_has_its_numbers(tmp_path):
    more = {"loss": 0.1, "grad_norm": 0.2, "entropy_estimate": 0.3, "approx_kl": 1e-3}
    run = write_run(tmp_path / "run", [0.1] * 10, **more)
    lines = [line | {"learning_rate": line["iteration"] / 8} for line in read_metrics(run)]
    figure = training([Curve("run", [lines])])
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert (len(shown), len(figure.axes)) == (5, 6), "fewer empty places than rows"
    numbered = [axes.get_title() for axes in shown if axes.xaxis.get_tick_params()["labelbottom"]]
    assert numbered == [axes.get_title() for axes in shown[2:]]
    assert list(shown[-1].get_lines()[0].get_ydata()) == [n / 8 for n in range(1, 11)], "a plan has no average"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["run: each", "run: average of 5"]


@pytest.mark.fault("a title of one's own took the place of what lines and bands mean")
def test_a_title_of_ones_own(tmp_path):
    runs = [write_run(tmp_path / name, [0.1, 0.2]) for name in ("run", "other")]
    assert main([f"x={runs[0]},{runs[1]}", "--title", "what I found"]) == 0
    text = (runs[0] / "learning_curve.svg").read_text()
    assert "what I found" in text
    assert "band: lowest to highest of 2 seeds" in text
    assert "synthetic-x" not in text


def write_collection(run, name, asked_at, spans, **end):
    """A collection of one task whose episodes began and ended at these seconds."""
    rollouts = [
        rollout([1, 2], [turn(1, 2)], collection_id=name, index=index, started_at=began, seconds=ended - began)
        for index, (began, ended) in enumerate(spans)
    ]
    log = write_rollouts(run / "node/collections", name, rollouts)
    facts = [{"opened": 1, "at": asked_at}, {"end": {"dropped_seconds": [], **end}}]
    meta_path(log.parent, name).write_text("".join(json.dumps(fact) + "\n" for fact in facts))


@pytest.mark.parametrize("stream", [False, True])
def test_slots_over_time_show_what_ran_waited_and_was_cut_off(tmp_path, capsys, stream):
    run = write_run(tmp_path / "run", [0.5, 0.5], seconds_waiting=7.0, **({"seconds_paced": 3.0} if stream else {}))
    first, second = (f"run-{name}-0123456789" for name in (("i0001-g0", "i0002-g1") if stream else ("i0001", "i0002")))
    write_collection(run, first, 100.0, [(100.0, 110.0), (104.0, 108.0)], seconds=20.0)
    write_collection(run, second, 110.0, [(112.0, 115.0)], seconds=10.0, dropped_seconds=[4.0])
    write_collection(run, "eval-a-t0-0123456789", 130.0, [(130.0, 132.0)], seconds=2.0)
    above, below = slots_over_time([str(run)]).axes
    running, waiting, policy = (dict(line.get_xydata()) for line in above.get_lines())
    assert running == {0: 1, 4: 2, 8: 1, 10: 0, 12: 1, 15: 0, 16: 1, 20: 0, 30: 1, 32: 0}
    assert waiting == {0: 1, 4: 0, 10: 2, 12: 1, 16: 0, 30: 0}
    assert [*policy] == [0], "the evaluation's policy is none of the run's"
    (band,) = above.patches
    assert (band.get_x(), band.get_width()) == (30, 2)
    assert above.get_title("left") == "run\nmade-up"
    lost = [line.get_xydata().tolist() for line in below.get_lines()[:-1]]
    assert lost == [[[0, 7.0], [10, 7.0]], [[0, 3.0], [10, 3.0]]][: 1 + stream]
    assert main(["--slots", str(run)]) == 0
    assert (run / "slots.png").exists()
    assert main(["--slots", str(write_run(tmp_path / "none", [0.5]))]) == 1
    assert "no episode has ended yet" in capsys.readouterr().err
    meta_path(run / "node/collections", first).write_text('{"opened": 1}\n')
    assert main(["--slots", str(run)]) == 1
    assert capsys.readouterr().err.endswith("perhaps of an earlier version, lack 'at'\n")
