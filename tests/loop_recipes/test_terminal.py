"""What is printed is whole on a terminal of 80 columns: a report, a comparison, a training, a wait."""

import io
import logging
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from agent_environments.description import description_of
from appworld_adapter.pool.forked import AppWorldPool
from loop_recipes.bar import Bar
from loop_recipes.evaluation.tables import Table, print_document, print_table, to_markdown
from loop_recipes.rollouts import waiting
from loop_recipes.rollouts.waiting import Waiting
from loop_recipes.run.metrics import SUMMARY_WORDS, summary_line
from loop_recipes.terminal import fold_logs, folded, say
from loop_recipes.verbs import compare
from support.stored_evaluation import STORED, report_again
from support.texts import texts_beside
from support.waiting import block_until

TABLES = texts_beside(__file__)

LINE = {
    **{"iteration": 12, "reward": 0.512, "success": 0.333, "kept_fraction": 0.9, "rollouts": 7200, "steps": 36},
    **{"clip_fraction": 0.0213, "gap_p99": 1.2e-4, "gap_verdict": "ok", "seconds": 5400.0},
    **{"seconds_collecting": 4312.8, "seconds_recomputing": 200.0, "seconds_updating": 800.0},
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def eighty(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")


def narrow() -> Console:
    return Console(file=io.StringIO(), width=80)


def is_whole(text: str) -> bool:
    return "…" not in text and max(map(len, text.splitlines())) <= 80


def test_a_report(tmp_path):
    shown = report_again(tmp_path, description_of("appworld", AppWorldPool), width=80)
    assert is_whole(shown)
    table = (tmp_path / "report.md").read_text().split("| policy | sampling |")[1].split("\n\n")[0].splitlines()[2:]
    said = " ".join(shown.split())
    assert len(table) == 4
    for cell in (cell.strip() for row in table for cell in row.strip("|").split("|")):
        assert cell in said
    assert "TGC: tasks that are solved; SGC: scenarios all of whose tasks are solved" in said


def test_a_comparison(monkeypatch, tmp_path):
    out = narrow()
    monkeypatch.setattr(compare, "console", lambda stream: out)
    assert compare.main([str(STORED), "--resamples", "300", "--out", str(tmp_path)]) == 0
    shown = out.file.getvalue()
    assert is_whole(shown)
    assert "TGC difference  " in shown
    written = (tmp_path / "comparison.md").read_text()
    for row in (line for line in written.splitlines() if line.startswith("| ") and " difference" not in line):
        assert all(cell.strip() in shown for cell in row.strip("|").split("|"))


def test_a_table_that_fits_stays_one():
    out = narrow()
    print_table(out, "few", Table(["a", "b"], [["x", "1 [0, 2]"]]))
    assert "│ x │ 1 [0, 2] │" in out.file.getvalue()
    print_table(out, "wide", Table(["a", "b"], [["x", "[0, 2] " * 12]]))
    assert "│" not in out.file.getvalue().partition("wide")[2]


def test_a_bar_in_a_cell_divides_no_cell():
    document, out = ["# Names", Table(["name", "share"], [["a | b", "1"]])], narrow()
    assert to_markdown(document) == "# Names\n\n| name | share |\n|---|---|\n| a \\| b | 1 |\n"
    print_document(out, document)
    assert "│ a | b │ 1     │" in out.file.getvalue()


def test_a_training():
    line = summary_line(LINE, 20)
    assert folded(line, io.StringIO(), "  ") == line, "a log has it in one line"
    shown = folded(line, Terminal(), "  ")
    assert is_whole(shown)
    assert [part for row in shown.splitlines() for part in row.strip().split("  ")] == line.split("  ")
    assert is_whole(folded(SUMMARY_WORDS, Terminal()))
    assert folded(SUMMARY_WORDS, Terminal()).split() == SUMMARY_WORDS.split()
    for word in ("kept", "steps", "clip", "gap", "left"):
        assert f"{word}: " in SUMMARY_WORDS
        assert f"  {word} " in line


def test_nothing_is_left_after_the_last_iteration():
    assert "  left 0 min" in summary_line(LINE | {"seconds": 1.0}, LINE["iteration"] + 1)
    assert "left" not in summary_line(LINE, LINE["iteration"])


@pytest.mark.fault("a table of memory poured into one paragraph on a terminal")
def test_lines_with_a_label_go_on_below_what_they_say():
    lines = [
        "log-probs      TiledLogProbs, log-probs by tiles over tokens and vocabulary, with a log-sum-exp in fp32",
        "task:     quest.py, 200 tasks in 200 groups, of which 40 are held out to score on, always the same: 160",
        "nothing found in 6 iterations of runs/demo; looked for: no signal, broken gap, cut turns, failing calls",
        "",
        "vllm-0    short",
        "trainer\n  base weights, bf16, sharded                         7.63 GiB\n  sum                   44.84 GiB",
    ]
    log, shown = io.StringIO(), Terminal()
    say(*lines, stream=log)
    assert log.getvalue() == "\n".join([*lines, ""]), "a log has each in one line"
    say(*lines, stream=shown)
    assert is_whole(shown.getvalue())
    assert shown.getvalue().split() == log.getvalue().split()
    below = [len(line) - len(line.lstrip()) for line in shown.getvalue().splitlines()]
    assert below == [0, 15, 0, 10, 0, 2, 0, 0, 0, 2, 2]
    assert lines[-1] in shown.getvalue(), "a row that fits keeps its blanks"


def test_what_is_logged(monkeypatch):
    """Of torchtune's logger and of any other; lines that were divided before stay as they are."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    handler = logging.StreamHandler(sys.stderr)
    own = logging.getLogger("torchtune.utils._logging")
    monkeypatch.setattr(own, "handlers", [handler])
    monkeypatch.setattr(own, "propagate", False)
    monkeypatch.setattr(logging.lastResort, "formatter", None)
    fold_logs()
    summary = folded(summary_line(LINE, 20), sys.stderr, "  ")
    for text in (
        SUMMARY_WORDS,
        "stopped while waiting for made-up-i0002-dev-0123; resume_from_checkpoint=True " * 3,
        summary,
    ):
        own.warning(text)
        logging.lastResort.emit(logging.makeLogRecord({"msg": text}))
        shown = sys.stderr.getvalue()
        sys.stderr.truncate(sys.stderr.seek(0))
        assert is_whole(shown)
        assert shown.split() == 2 * text.split()
    assert shown == 2 * f"{summary}\n"


@pytest.mark.parametrize(("done", "total", "facts", "cells"), TABLES["a_bar_has_ten_cells_or_none"])
def test_a_bar_has_ten_cells_or_none(done, total, facts, cells):
    with Bar(total=total, doing="collecting", disable=False) as bar:
        bar.dynamic_ncols, bar.ncols, bar.n, bar.facts = None, 80, done, facts
        shown = str(bar)
    assert is_whole(shown)
    assert shown.startswith(f"collecting {done}/{total}")
    assert ("|" in shown) == cells
    if cells:
        assert len(shown.split("|")[1]) == 10
        assert shown.split("|")[1].count("#") == min(10 * done // total, 10)
        assert "left -" not in shown
        assert all((f"{name} {count}" in shown) == bool(count) for name, count in facts.items())


def test_a_bar_is_shown_after_a_second_and_leaves_nothing(capsys):
    with Bar(total=54, doing="collecting", disable=False) as bar:
        bar.start_t += 1000.0
        bar.refresh()
        assert capsys.readouterr().err == ""
        bar.start_t -= 1002.0
        bar.refresh()
        shown = capsys.readouterr().err
        assert shown.startswith("\rcollecting 0/54 ")
    cleared = capsys.readouterr().err
    assert cleared.strip("\r ") == ""
    assert len(cleared.strip("\r")) >= len(shown.strip())


@pytest.mark.fault("a bar stood still for minutes, and its time left was reckoned from the first step that ended")
@pytest.mark.parametrize(("done", "total", "counted", "elapsed", "left"), TABLES["time_left"])
def test_the_time_left_falls_and_is_not_said_too_early(done, total, counted, elapsed, left):
    with Bar(total=total, doing="updating", disable=False) as bar:
        bar.dynamic_ncols, bar.ncols = None, 80
        bar.update(done)
        bar.start_t = bar._time() - elapsed
        bar._counted_at = bar.start_t + counted
        assert str(bar).partition(", left ")[2] == left


def test_a_bar_moves_by_itself(capsys):
    with Bar(total=1, doing="updating", disable=False) as bar:
        bar.start_t -= 100.0
        block_until(lambda: "updating 0/1 |          |, 01:4" in capsys.readouterr().err)
    assert not bar._mover.is_alive()


def test_a_wait_takes_the_lines_that_it_needs(monkeypatch):
    monkeypatch.setattr(waiting, "REFRESH_S", 0.01)
    stream = Terminal()
    detail = "trained on what is long to say, T=1 top_p=0.95 top_k=40: 13 of 4800 rollouts, left 241 min, " * 2
    with Waiting("evaluating", stream) as shown:
        shown.report(detail.strip())
        block_until(lambda: stream.getvalue().count("\x1b[2A") >= 1)
    drawn = stream.getvalue().split("\r")
    assert stream.getvalue().endswith("\r\x1b[2A\x1b[J")
    long = next(text for text in drawn if "4800" in text).removeprefix("\x1b[J").removeprefix("\x1b[2A\x1b[J")
    assert is_whole(long)
    assert long.split(" s, ", 1)[1].split() == detail.split()


def test_a_stop_is_answered_at_once():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", texts_beside(__file__)["stops"]], capture_output=True, text=True, env=environment
    )
    assert done.stderr.count("stopping after what was begun") == 1
    assert done.stderr.count("stopping before the next optimizer step") == 1
    assert done.returncode == -signal.SIGINT
    assert is_whole(done.stderr)
