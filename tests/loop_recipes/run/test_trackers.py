"""A tracker that fails, hangs or is away costs a line and no run; a resumed run tells each point once."""

import threading

import pytest
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from loop_appworld import LoopAppWorldRecipe
from loop_formats.run_files import read_lines
from loop_formats.schema import ConfigError
from loop_recipes.algorithm.learner import Learner
from loop_recipes.run import trackers
from loop_recipes.run.metrics import RunMetrics
from loop_recipes.run.tracker import TrackerState, points
from loop_recipes.run.trackers import Trackers
from support.small_runs import replay_config, train


class Fake:
    """Remembers what it is told; may raise at a point, or block in a method until an event."""

    offline = ""

    def __init__(self, raises_at=(), blocks_in=None):
        self.told, self.raises_at, self.blocks_in = [], set(raises_at), blocks_in
        self.blocked, self.release, self.closed = threading.Event(), threading.Event(), False

    def _block(self, method):
        if self.blocks_in == method:
            self.blocked.set()
            self.release.wait()

    def open(self, folder, config, told):
        self._block("open")
        return TrackerState(told.run or "its run", told.points)

    def tell(self, number, point):
        self._block("tell")
        if number in self.raises_at:
            self.raises_at.remove(number)
            raise RuntimeError("the server said no")
        self.told.append((number, point.step, dict(point.numbers)))

    def close(self):
        self._block("close")
        self.closed = True


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Open a run's metrics with one fake tracker."""

    def open_metrics(fake, after_iteration=0, **limits):
        for name, seconds in {"OPENING_S": 60.0, "CLOSING_S": 60.0, **limits}.items():
            monkeypatch.setattr(trackers, name, seconds)
        monkeypatch.setattr(trackers, "named_tracker", lambda name: fake)
        chosen = Trackers(["fake"], output_dir=tmp_path, after_iteration=after_iteration)
        return RunMetrics(tmp_path / "metrics.jsonl", chosen, after_iteration)

    return open_metrics


def lines_of(caplog):
    return [record.getMessage() for record in caplog.records if record.name == trackers.__name__]


def test_a_tracker_that_fails_is_said_once_and_told_what_it_missed(opened, tmp_path, caplog):
    fake = Fake(raises_at={1, 2})
    metrics = opened(fake)
    for iteration in range(1, 6):
        metrics.log({"iteration": iteration, "loss": 0.5})
        metrics.tell()
    metrics.close()
    assert [line.record["iteration"] for line in read_lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    told = [number for number, _, _ in fake.told]
    assert told == list(range(len(told)))
    [first, *rest] = lines_of(caplog)
    assert first.startswith("tracker: fake: RuntimeError: the server said no")
    assert "the run goes on" in first
    assert "\n" not in first
    # Each attempt meets one error; had the run ended before there was a third, it says what is missing.
    assert len(told) == 5 or rest == [
        f"tracker: fake has {len(told)} of 5 points; the same command with resume_from_checkpoint=True sends the rest"
    ]


def test_a_resumed_run_tells_what_is_missing_as_the_same_run(opened):
    first = Fake(raises_at={1})
    metrics = opened(first)
    for iteration in (1, 2, 3):
        metrics.log({"iteration": iteration, "loss": float(iteration)})
    metrics.tell()
    metrics.close()
    second = Fake()
    metrics = opened(second, after_iteration=3)
    metrics.tell()
    metrics.close()
    assert [number for number, _, _ in first.told + second.told] == [0, 1, 2]


@pytest.mark.parametrize("method", ["open", "tell"])
def test_a_tracker_that_hangs_is_said_once_and_holds_nothing_up(opened, caplog, method):
    fake = Fake(blocks_in=method)
    metrics = opened(fake, HANG_S=0.0, CLOSING_S=0.0, OPENING_S=0.0 if method == "open" else 60.0)
    metrics.log({"iteration": 1})
    metrics.tell()
    assert fake.blocked.wait(60)
    for iteration in (2, 3, 4):
        metrics.log({"iteration": iteration})
        metrics.tell()
    metrics.close()
    said = lines_of(caplog)
    assert len(said) == 2
    assert "has not answered for 0 s" in said[0] or "has not opened within 0 s" in said[0]
    assert said[1].startswith("tracker: fake has 0 of 4 points")
    fake.release.set()


def test_a_slow_tracker_is_no_hang(opened, caplog):
    fake = Fake(blocks_in="tell")
    metrics = opened(fake, HANG_S=3600.0)
    for iteration in (1, 2, 3):
        metrics.log({"iteration": iteration})
        metrics.tell()
    assert fake.blocked.wait(60)
    fake.release.set()
    metrics.close()
    assert [step for _, step, _ in fake.told] == [1, 2, 3]
    assert lines_of(caplog) == []


def test_a_close_that_blocks_or_fails_ends_nothing(opened, caplog, monkeypatch):
    fake = Fake(blocks_in="close")
    metrics = opened(fake)
    metrics.log({"iteration": 1})
    metrics.tell()
    monkeypatch.setattr(trackers, "CLOSING_S", 0.0)
    closing = threading.Thread(target=metrics.close)
    closing.start()
    closing.join(60)
    assert not closing.is_alive()
    fake.release.set()
    broken = Fake()
    broken.close = lambda: 1 / 0
    caplog.clear()
    metrics = opened(broken)
    metrics.close()
    [said] = lines_of(caplog)
    assert "ZeroDivisionError" in said


def test_what_can_never_open_is_refused_and_what_is_away_is_not(opened, caplog):
    def raises(error):
        def open_(folder, config, told):
            raise error

        return open_

    missing, unwritable, away = Fake(), Fake(), Fake()
    missing.open = raises(ImportError("no module named fake"))
    unwritable.open = raises(NotADirectoryError(20, "Not a directory", "/etc/hosts/x"))
    away.open = raises(ConnectionRefusedError(111, "Connection refused"))
    with pytest.raises(ConfigError, match=r"^tracker: fake: no module named fake$"):
        opened(missing)
    with pytest.raises(ConfigError, match=r"^tracker: fake: .*/etc/hosts/x"):
        opened(unwritable)
    assert lines_of(caplog) == []
    opened(away).close()
    assert len(lines_of(caplog)) == 1


def test_a_new_run_in_the_folder_tells_everything(opened):
    for _ in range(2):
        fake = Fake()
        metrics = opened(fake)
        metrics.log({"iteration": 1, "loss": 1.0})
        metrics.tell()
        metrics.close()
        assert fake.told == [(0, 1, {"iteration": 1, "loss": 1.0})]


def test_points_have_flat_names_and_later_scores_leave_earlier_points_as_they_are():
    line = {
        "iteration": 2,
        "dataset": "train",
        "seconds": 3.0,
        "gap_mean": None,
        "environments": {"craft": {"reward": 0.5}},
        "stated": {"rewards": {"form": 0.25}},
    }
    first = {"dev_iteration": 1, "dev_success": 0.1}
    last = {"dev_iteration": 2, "dev_success": 0.2, "earlier_dev_iteration": 1, "earlier_dev_success": 0.1}
    plain, amended, twice = points([line]), points([line | first]), points([line | last])
    assert dict(plain[0].numbers) == {"iteration": 2, "seconds": 3.0, "craft/reward": 0.5, "rewards/form": 0.25}
    assert amended[: len(plain)] == plain
    assert twice[: len(amended)] == amended
    assert [(point.step, point.seconds) for point in twice] == [(2, 3.0), (1, 3.0), (2, 3.0)]
    assert dict(twice[2].numbers) == {"dev_iteration": 2, "dev_success": 0.2}


def killed(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", [(Learner, "save_checkpoint"), (RunMetrics, "tell")])
def test_tensorboard_has_every_point_once_after_a_kill_and_a_resume(tmp_path, monkeypatch, place):
    """Killed between log and save, and between save and what is told."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2))
    cfg.tracker = "tensorboard"
    end = LoopAppWorldRecipe._log

    def log_and_then_die(self, iteration, metrics):
        end(self, iteration, metrics)
        if iteration == 2:
            monkeypatch.setattr(*place, killed)

    with monkeypatch.context() as during:
        during.setattr(LoopAppWorldRecipe, "_log", log_and_then_die)
        with pytest.raises(KeyboardInterrupt):
            train(cfg)
    monkeypatch.undo()
    cfg.resume_from_checkpoint = True
    train(cfg)
    lines = [line.record for line in read_lines(tmp_path / "run/metrics.jsonl")]
    events = EventAccumulator(str(tmp_path / "run/trackers/tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    tags = events.Tags()["scalars"]
    seen = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    wanted = {}
    for point in points(lines):
        for name, value in point.numbers.items():
            wanted.setdefault(name, []).append((point.step, pytest.approx(value, rel=1e-6)))
    assert [line["iteration"] for line in lines] == [1, 2]
    assert seen == wanted
