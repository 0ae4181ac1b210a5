"""Scores on the way: which policy they are of, that no update waits for them, and which checkpoint they keep."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.collection_request import CollectionEnd
from loop_formats.ids import parse_collection_id
from loop_recipes.engine.checkpoint import load_latest
from loop_recipes.run.stop_request import StopRequested
from rollout_server.client import CollectionFailed, NodeUnreachable
from rollout_server.node_process import NodeDied
from support.fake_node import FakeNode, collected, short
from support.small_runs import on_source, replay_config, set_up


class ScriptedNode(FakeNode):
    """Replays the training collections; evaluations solve ``solved[version]`` of the four dev tasks."""

    def __init__(self, logs: Path, solved: list[int], stop_in: str | None = None, fails_in: str | None = None) -> None:
        super().__init__(logs, ["dev_1", "dev_2", "dev_3", "dev_4"])
        self.folder, self.solved, self.stop_in, self.fails_in = logs, solved, stop_in, fails_in
        self.kept: dict[int, int] = {}
        """By version, of how many dev tasks the rollouts were not lost, where that is not all."""

    def start(self, request):
        if f"start {short(request)}" not in self.events:
            super().start(request)

    def read(self, request):
        found = super().read(request)
        if short(request) == self.stop_in:
            (self.folder.parent / "run/stop").touch()
            raise StopRequested
        if short(request) == self.fails_in:
            end = CollectionEnd("failed", 3, 0, 0, {"environment": 3}, 0.0)
            raise CollectionFailed(f"collection {request.id} failed: 4 of 4 rollouts lost", end)
        if not parse_collection_id(request.id).dev:
            return found
        assert (request.tasks, request.rollouts_per_task) == (self.dev_tasks, 1)
        solved = [number < self.solved[request.policy_version] for number in range(len(found.rollouts))]
        rollouts = [
            replace(rollout, success=success, reward=0.5 + 0.5 * success)
            for rollout, success in zip(found.rollouts, solved, strict=True)
        ]
        # Tests that pass at the turn limit solve nothing; without this one, one policy would look better than it is.
        rollouts[-1] = replace(rollouts[-1], success=True, end_reason="turn_limit")
        return collected(rollouts[: self.kept.get(request.policy_version)])


def run(folder, monkeypatch, source, iterations, every, **changes):
    cfg = OmegaConf.load(replay_config(folder, iterations=iterations, **changes))
    on_source(monkeypatch, cfg, source)
    cfg.dev_evaluation = {"every": every}
    cfg.sampler_gap = {"ok": 1.0, "broken": 100.0}  # nobody sampled these
    recipe = LoopAppWorldRecipe(cfg)
    update = recipe.update

    def watched(*arguments):
        source.events.append("update")
        return update(*arguments)

    recipe.update = watched
    with set_up(recipe):
        recipe.train()
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def logs(folder):
    folder.mkdir(exist_ok=True)
    replay_config(folder, iterations=4)
    return folder / "logs"


@pytest.mark.fault("a run that was to have fewer iterations than it has gave one of them the score of the last")
def test_a_policy_is_scored_while_the_next_iteration_updates(tmp_path, monkeypatch, caplog):
    source = ScriptedNode(logs(tmp_path), solved=[1, 0, 3, 0, 2])
    lines = run(tmp_path, monkeypatch, source, 4, every=2, keep_last_checkpoints=1)
    assert source.events[:9] == [
        "publish 0",
        "start made-up-i0001",
        "read made-up-i0001",
        "start made-up-i0000-dev",
        "update",
        "read made-up-i0000-dev",
        "publish 1",
        "start made-up-i0002",
        "read made-up-i0002",
    ]
    assert source.events[-3:] == ["publish 4", "start made-up-i0004-dev", "read made-up-i0004-dev"]
    assert [line.get("dev_iteration") for line in lines] == [0, None, 2, 4]
    assert [line.get("dev_success") for line in lines] == [0.25, None, 0.75, 0.5]
    assert [line.get("dev_reward") for line in lines] == [0.625, None, 0.875, 0.75]
    kept = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert [int(name.rpartition("_")[2].rpartition("-")[2]) for name in kept] == [2, 4]
    source = ScriptedNode(logs(tmp_path), solved=[1, 0, 3, 0, 2])
    assert run(tmp_path, monkeypatch, source, 2, every=2, resume_from_checkpoint=True) == lines, "more were done"
    assert "4 iterations are done, and max_iterations is 2: give more to go on" in caplog.text


def test_an_evaluation_comes_before_the_collection_of_the_next_iteration(tmp_path, monkeypatch):
    """With policy lag 1 both are asked for before the update; the trainer waits for the evaluation first."""
    source = ScriptedNode(logs(tmp_path), solved=[0, 0, 0, 0, 0])
    collection = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml").collection) | {"max_policy_lag": 1}
    run(tmp_path, monkeypatch, source, 2, every=1, collection=collection)
    first = source.events.index("start made-up-i0000-dev")
    assert source.events[first : first + 3] == ["start made-up-i0000-dev", "start made-up-i0002", "update"]


def test_a_score_that_a_stop_cut_off_is_waited_for_by_the_resumed_run(tmp_path, monkeypatch):
    """What was updated is saved at once; the policy to be scored stays, and is served again."""
    solved = [0, 3, 1, 2]
    whole = run(tmp_path / "whole", monkeypatch, ScriptedNode(logs(tmp_path / "whole"), solved), 3, every=1)
    folder = tmp_path / "stopped"
    source = ScriptedNode(logs(folder), solved, stop_in="made-up-i0001-dev")
    before = run(folder, monkeypatch, source, 3, every=1)
    assert [line["steps"] > 0 for line in before] == [True, True], "it ends after the update in hand"
    assert "dev_success" not in before[1]
    source = ScriptedNode(logs(folder), solved)
    after = run(folder, monkeypatch, source, 3, every=1, resume_from_checkpoint=True)
    assert source.events[:5] == [
        *("publish 1", "publish 2", "start made-up-i0001-dev", "read made-up-i0001-dev"),
        "start made-up-i0003",
    ]
    keys = ("iteration", "dev_iteration", "dev_success", "dev_reward", "dev_lost", "loss")
    assert [[line[key] for key in keys] for line in after] == [[line[key] for key in keys] for line in whole]
    saved = [load_latest(each / "run/checkpoints") for each in (tmp_path / "whole", folder)]
    assert [state.state["best"] for state in saved] == [{"iteration": 1, "dev_solved": 3.0}] * 2
    assert [list(state.adapters) for state in saved] == [[3], [3]], "no version is kept for what is scored"


@pytest.mark.fault("a policy that lost the rollouts of most dev tasks became the best of its run")
def test_the_best_policy_has_solved_the_most_tasks(tmp_path, monkeypatch):
    source = ScriptedNode(logs(tmp_path), [0, 3, 1])
    source.kept[2] = 1
    lines = run(tmp_path, monkeypatch, source, 2, every=1)
    assert (lines[-1]["dev_success"], lines[-1]["dev_tasks"]) == (1.0, 1)
    assert load_latest(tmp_path / "run/checkpoints").state["best"] == {"iteration": 1, "dev_solved": 3.0}


def test_a_stop_during_the_last_score_is_said_and_does_not_stop_the_resumed_run(tmp_path, monkeypatch, caplog):
    source = ScriptedNode(logs(tmp_path), [0, 3, 1], stop_in="made-up-i0002-dev")
    run(tmp_path, monkeypatch, source, 2, every=1)
    assert "stopped while waiting for made-up-i0002-dev-" in caplog.text
    assert not (tmp_path / "run/stop").exists()
    source = ScriptedNode(logs(tmp_path), [0, 3, 1])
    lines = run(tmp_path, monkeypatch, source, 2, every=1, resume_from_checkpoint=True)
    assert lines[-1]["dev_iteration"] == 2


def test_the_checkpoint_that_is_being_scored_is_kept(tmp_path, monkeypatch):
    solved = [0, 3, 1, 2]
    source = ScriptedNode(logs(tmp_path), solved, stop_in="made-up-i0001-dev")
    run(tmp_path, monkeypatch, source, 3, every=1, keep_last_checkpoints=1)
    kept = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert sorted(kept) == ["iteration_0001", "iteration_0002"]
    source = ScriptedNode(logs(tmp_path), solved)
    run(tmp_path, monkeypatch, source, 3, every=1, keep_last_checkpoints=1, resume_from_checkpoint=True)
    kept = [path.name for path in (tmp_path / "run/checkpoints").iterdir()]
    assert sorted(kept) == ["iteration_0001", "iteration_0003"], "the best, and the last"


def test_the_run_s_last_line_keeps_the_score_of_the_policy_before_its_own(tmp_path, monkeypatch):
    lines = run(tmp_path, monkeypatch, ScriptedNode(logs(tmp_path), [0, 3, 1]), 2, every=1)
    assert [line["dev_iteration"] for line in lines] == [0, 2]
    assert [line["dev_success"] for line in lines] == [0.0, 0.25]
    assert (lines[1]["earlier_dev_iteration"], lines[1]["earlier_dev_success"]) == (1, 0.75)
    assert (lines[1]["earlier_dev_reward"], lines[1]["earlier_dev_lost"]) == (0.875, 0)
    assert not any(key.startswith("earlier") for key in lines[0])


def test_an_evaluation_that_is_lost_altogether_costs_a_score_and_not_the_run(tmp_path, monkeypatch, caplog):
    source = ScriptedNode(logs(tmp_path), [0, 3, 1, 2], fails_in="made-up-i0001-dev")
    lines = run(tmp_path, monkeypatch, source, 3, every=1)
    assert [line.get("dev_success") for line in lines] == [0.0, None, 0.5]
    assert "this policy has no dev score: collection made-up-i0001-dev-" in caplog.text
    assert "4 of 4 rollouts lost" in caplog.text


def test_an_update_is_saved_before_the_node_is_asked_for_anything(tmp_path, monkeypatch):
    """So it is not lost when the node dies during the update, or stays away, or refuses a version."""

    class Away(ScriptedNode):
        def read(self, request):
            if dies_in == "score" and short(request) == "made-up-i0000-dev":
                raise NodeDied("the rollout node ended with status 1")
            return super().read(request)

        def retire(self, version):
            if dies_in == "retire":
                raise NodeUnreachable("no rollout node")

    for dies_in, error in (("score", NodeDied), ("retire", NodeUnreachable)):
        folder = tmp_path / dies_in
        with pytest.raises(error):
            run(folder, monkeypatch, Away(logs(folder), [0, 3, 1, 2]), 3, every=1)
        saved = load_latest(folder / "run/checkpoints")
        assert (saved.state["iteration"], saved.state["policy_version"]) == (1, 1)
        source = ScriptedNode(logs(folder), [0, 3, 1, 2])
        lines = run(folder, monkeypatch, source, 3, every=1, resume_from_checkpoint=True)
        assert source.events.count("update") == 2
        assert [line["dev_iteration"] for line in lines] == [0, 1, 3]
