"""Pictures of rollouts: what is compared, the intervals, and the tree of API calls."""

import json
from collections import Counter

import pytest
from matplotlib.patches import Rectangle

from appworld_adapter.pool.forked import AppWorldPool
from loop_contrib.behavior_plots.rollouts import (
    behavior_change,
    behavior_interval,
    call_sequences,
    read_attempts,
    read_periods,
)
from loop_formats.ids import evaluation_id, replay_id
from loop_formats.run_folder import write_description
from loop_recipes.plots.curves import main

APPWORLD = AppWorldPool.description
FIGURES = {figure.name: figure for figure in APPWORLD.figures}
FAILED = "Execution failed. Traceback:\nKeyError"


def line(task, index, turns, success=False, started_at=0.0, temperature=1.0):
    """A record of a log with what the pictures read; ``turns`` are (code, output)."""
    messages = [{"role": "user", "content": "Task"}]
    for code, output in turns:
        messages += [
            {"role": "assistant", "content": f"```python\n{code}\n```"},
            {"role": "user", "content": output},
        ]
    record = {"dataset": "synthetic-x", "task_id": task, "index": index, "success": success}
    record |= {"episode_id": f"c/{task}/{index}.0", "started_at": started_at, "temperature": temperature}
    spoken = [{"message": 1 + 2 * number} for number in range(len(turns))]
    return json.dumps({**record, "messages": messages, "turns": spoken}) + "\n"


def call(name):
    return f"print(apis.{name}())", "done"


@pytest.fixture
def run(tmp_path):
    """Twenty iterations: early ones fail every other turn, late ones never and are a turn shorter."""
    folder = tmp_path / "demo/node/collections"
    folder.mkdir(parents=True)
    write_description(tmp_path / "demo", APPWORLD)
    for iteration in range(1, 21):
        late = iteration > 10
        lines = []
        for task in ("a_1", "b_1"):
            for index in range(4):
                turns = [call("phone.login"), call("phone.search" if index % 2 else "gmail.search")]
                if not late:
                    turns.insert(1, ("apis.phone.login()", FAILED))
                lines.append(line(task, index, turns, success=late))
        (folder / f"demo-i{iteration:04d}.jsonl").write_text("".join(lines))
        (folder / f"demo-i{iteration:04d}.meta.jsonl").write_text("{}\n")
    (folder / "demo-i0020-dev.jsonl").write_text(line("c_1", 0, [call("x.y")]))
    return tmp_path / "demo"


def test_the_first_and_the_last_tenth_of_the_iterations_are_compared(run):
    dataset, periods = read_periods(run)
    assert dataset == "synthetic-x"
    assert [(period.name, len(period.attempts)) for period in periods] == [
        ("iterations 1-2", 16),
        ("iterations 19-20", 16),
    ]
    figure = behavior_change(periods, dataset, APPWORLD.figures[:8])
    panels = {axes.get_title().split(" (")[0]: axes for axes in figure.axes}
    turns = [patch.get_height() for patch in panels["turns per rollout"].patches]
    assert turns == pytest.approx([3.0, 2.0])
    assert panels["turns per rollout"].get_title().endswith("(-33%)")
    errors = [patch.get_height() for patch in panels["execution errors per turn"].patches]
    assert errors == pytest.approx([1 / 3, 0.0])
    assert [text.get_text() for text in panels["failed-call give-up rate"].texts] == ["1.00", "no call failed"]
    errors = [text.get_text() for text in panels["execution errors per turn"].texts]
    assert errors == ["0.333", "0.000"], "as many decimals in a panel"
    assert "whiskers: 95% bootstrap interval" in figure._suptitle.get_text()
    with (run / "stream.jsonl").open("w") as stream:
        for number in range(1, 21):  # groups of a stream, all of them asked for in the first iteration
            log = run / f"node/collections/demo-i{number:04d}.jsonl"
            name = log.rename(log.with_name(f"demo-i0001-g{number}.jsonl")).stem
            stream.write(json.dumps({"taken": {"group": name, "iteration": number}}) + "\n")
    assert read_periods(run) == (dataset, periods)


def test_intervals_are_over_tasks_not_rollouts(run):
    _, (early, _) = read_periods(run)
    assert behavior_interval(early.attempts, FIGURES["turns"]) == pytest.approx((3.0, 3.0))
    uneven = [item for item in early.attempts if item.task_id == "a_1"]
    changed = [item for item in early.attempts if item.task_id == "b_1"]
    longer = [type(item)("b_1", item.index, False, {**item.behavior, "turns": 5}, ()) for item in changed]
    assert behavior_interval(uneven + longer, FIGURES["turns"]) == pytest.approx(
        (3.0, 5.0)
    )  # two tasks, whatever the rollouts


def test_sequences_that_begin_alike_share_their_boxes(run):
    dataset, periods = read_periods(run)
    figure = call_sequences(periods, "a_1", dataset)
    late = figure.axes[1]
    assert late.get_title() == "iterations 19-20, 8 rollouts: 2 sequences of calls, 1 first call"
    boxes = Counter(
        (box.get_x(), box.get_height()) for box in late.patches if isinstance(box, Rectangle) and box.get_width() == 1
    )
    assert boxes == {(0, 8): 1, (1, 4): 2}
    assert [line.get_xdata()[0] for line in late.get_lines()] == [2.25] * 8, "each that solved, behind its last call"
    assert not figure.axes[0].get_lines()
    assert late.get_xlim()[0] == 0, "the first call stands at the edge"
    assert figure.legends[0].get_texts()[-1].get_text() == "solved"


def test_an_evaluation_or_a_single_log_is_a_period_of_its_own(run, tmp_path, capsys):
    log = run / "node/collections/demo-i0001.jsonl"
    _, (period,) = read_periods(log)
    assert (period.name, len(period.attempts)) == ("iteration 1", 8)
    assert main(["--rollouts", str(run), "--out", str(tmp_path / "out"), "--task", "b_1"]) == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == [f"{name}.{kind}" for name in ("behavior_change", "call_sequences") for kind in ("png", "svg")]
    assert "task b_1" in (tmp_path / "out/call_sequences.svg").read_text()
    assert main(["--rollouts", str(run), "--task", "c_1"]) == 1
    assert "no rollout of task 'c_1'" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert main(["--rollouts", str(tmp_path / "empty")]) == 1
    assert "holds no rollouts" in capsys.readouterr().err
    log = tmp_path / "empty/node/collections/x.jsonl"
    log.parent.mkdir(parents=True)
    log.write_text(line("a_1", 0, []))
    assert main(["--rollouts", str(tmp_path / "empty")]) == 1
    assert "no tool was called for task a_1" in capsys.readouterr().err


def test_tasks_asked_for_by_themselves_belong_to_their_score(tmp_path):
    """As an evaluation leaves them whose node gave up on a task: then each is asked for anew, in all its runs."""
    folder = tmp_path / "node/collections"
    folder.mkdir(parents=True)
    write_description(tmp_path, APPWORLD)
    before, after = evaluation_id("before-t1", ""), evaluation_id("after-t1", "")
    (folder / f"{before}.jsonl").write_text(line("a_1", 0, [call("x.y")]))
    (folder / f"{after}.jsonl").write_text(line("a_1", 0, [call("x.y")], True) + line("a_2", 0, [call("x.y")], True))
    alone = [line("a_2", index, [call("x.y"), call("x.y")]) for index in range(2)]
    (folder / f"{replay_id(after, 'a_2')}.jsonl").write_text("".join(alone))
    _, periods = read_periods(tmp_path)
    assert [period.name for period in periods] == ["after-t1", "before-t1"]
    counted = [(item.task_id, item.index, item.behavior["turns"]) for item in periods[0].attempts]
    assert counted == [("a_1", 0, 1), ("a_2", 0, 1), ("a_2", 1, 2)]


def test_an_evaluation_compares_its_first_policy_with_its_last_at_one_temperature(tmp_path):
    folder = tmp_path / "node/collections"
    folder.mkdir(parents=True)
    for place, (policy, temperature) in enumerate((p, t) for p in ("before", "between", "after") for t in (0.0, 1.0)):
        text = line("a_1", 0, [call("x.y")], started_at=float(place), temperature=temperature)
        (folder / f"{evaluation_id(f'{policy}-t{temperature:g}', '')}.jsonl").write_text(text)
    _, periods = read_periods(tmp_path)
    assert [period.name for period in periods] == ["before-t0", "after-t0"]


def test_an_episode_of_several_sequences_is_one_attempt(tmp_path):
    """The same episode, its second turn in a sequence of its own, which shows the turn before it."""
    write_description(tmp_path, APPWORLD)
    turns = [call("phone.login"), call("phone.search")]
    whole = json.loads(line("a_1", 0, turns))
    sequences = [json.loads(line("a_1", 0, turns[:1])), {**whole, "turns": whole["turns"][1:]}]
    read = []
    for name, records in (("whole", [whole]), ("split", sequences)):
        (tmp_path / name).write_text("".join(json.dumps(record) + "\n" for record in records))
        read.append([(a.task_id, a.calls, a.behavior["turns"]) for a in read_attempts(tmp_path / name)])
    assert read == [[("a_1", ("phone.login", "phone.search"), 2)]] * 2
