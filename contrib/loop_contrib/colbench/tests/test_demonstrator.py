"""ColBench's demonstrations: what is asked, thought and answered, the flaws, and the same about another field."""

import asyncio
import random
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from agent_environments.protocol import Message, create_pool
from loop_contrib.colbench.demonstrator import FLAWS, ColBenchDemonstrator, early_stops, possible_flaws
from loop_contrib.colbench.tasks import ColBenchTasks
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose
from loop_recipes.warm_start.demonstration import Demonstration, collect
from rollout_server.config import EnvironmentConfig
from support.adapter_support import word_spans
from warm_start_appworld import WarmStartRecipe

ENVIRONMENT = EnvironmentConfig("colbench")
CAREFUL = (
    ("What is the field called?", "The field is called value."),
    ("What is the limit?", "The limit is 10."),
    ("What does a missing value count as?", "A missing value counts as 100."),
    (
        "The field is called value, so field: value. The limit is 10, so limit: 10. I guess default: 100.\n"
        'large = [row.get("value", 100) for row in rows if value > 10]',
        "",
    ),
)
OPENING = (Message("system", "You have 10 messages."), Message("user", "Add up my value."))


@pytest.fixture(scope="module")
def demonstrator() -> ColBenchDemonstrator:
    return ColBenchDemonstrator(ENVIRONMENT)


def test_the_careful_play_succeeds_and_a_flawed_one_does_not(demonstrator: ColBenchDemonstrator):
    scripts = demonstrator.scripts("train", 5, seed=0)
    scripts += demonstrator.scripts("train", 12, seed=1, habits=FLAWS)
    played = asyncio.run(collect(create_pool("colbench", {}, word_spans), scripts, at_once=2))
    assert [one.success for one in played] == [True] * 5 + [False] * 12
    assert [one.flaw for one in played[:5]] == [None] * 5
    assert {one.flaw for one in played[5:]} == set(FLAWS)
    for one in played[5:]:
        assert (len(one.steps) == 1) == (one.flaw == "answered_at_once")


def test_what_is_said_stands_in_the_thought_before_the_code(demonstrator: ColBenchDemonstrator):
    task = ColBenchTasks()["train_best000_1"]
    (script,) = (one for one in demonstrator.scripts("train", 400, seed=0) if one.task_id == task.task_id)
    *questions, answer = script.turns
    assert len(questions) == len(task.particulars) == 3
    thought, _, code = answer.partition("\nI WANT TO ANSWER:\n")
    assert code == task.reference
    for particular in task.particulars:
        assert particular.answer[:-1] in thought
    field = task.particulars[0].answer.split()[-1][:-1]
    assert thought.startswith(f"The field is called {field}, so field: {field}. ")


def test_scripts_repeat_with_their_seed_and_take_every_task_in_turn(demonstrator: ColBenchDemonstrator):
    first, again, other = (demonstrator.scripts("dev", 80, seed, flawed_share=0.5) for seed in (0, 0, 1))
    assert first == again != other
    assert len({script.task_id for script in first[:40]}) == 40
    assert {script.flaw for script in first} == {None, *FLAWS}


def test_who_stops_asking_leaves_out_something_that_he_guesses_wrong():
    for task in ColBenchTasks().values():
        assert all(0 < asked < len(task.particulars) for asked in early_stops(task))
        assert possible_flaws(task)[0] == "answered_at_once"
    # What is left out after the first question is what one would guess.
    lucky = next(task for task in ColBenchTasks().values() if not early_stops(task))
    assert possible_flaws(lucky) == ["answered_at_once"]


def test_field_and_limit_are_others_wherever_they_are_meant(demonstrator: ColBenchDemonstrator):
    original = Demonstration("train_total000_1", None, 1.0, True, OPENING, CAREFUL)
    seen = set()
    for seed in range(20):
        other = demonstrator.renamed(original, random.Random(seed))
        field, limit = (other.steps[place][1].split()[-1][:-1] for place in (0, 1))
        assert other.opening == OPENING
        assert other.steps[2] == CAREFUL[2]
        assert other.steps[3][0] == (
            f"The field is called {field}, so field: {field}. The limit is {limit}, so limit: {limit}. "
            f'I guess default: 100.\nlarge = [row.get("{field}", 100) for row in rows if value > {limit}]'
        )
        seen.add((field, limit))
    assert len(seen) > 15


def test_what_nobody_has_said_stays_as_it_was_guessed(demonstrator: ColBenchDemonstrator):
    hasty = replace(
        Demonstration("train_total000_1", "answered_at_once", 0.0, False, OPENING, CAREFUL[3:]),
        steps=(("I guess field: amount. I guess limit: 10.", ""),),
    )
    assert demonstrator.renamed(hasty, random.Random(0)) == hasty


def test_groups_are_the_families(demonstrator: ColBenchDemonstrator):
    assert demonstrator.group("train_best078_1") == "best"


def test_what_no_expert_can_show_is_refused(demonstrator: ColBenchDemonstrator, tmp_path):
    with pytest.raises(ConfigError, match="no demonstrations of exam: no split 'exam'"):
        demonstrator.scripts("exam", 1, seed=0)
    with pytest.raises(ConfigError, match=r"^environment: .*options it does not take"):
        ColBenchDemonstrator(EnvironmentConfig("colbench", {"snake": "python"}))
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem_description": "d", "ground_truth": "def f(): return 1", "test_cases": ["f()"]}\n')
    human = {"url": "http://127.0.0.1:1", "model": "m", "api_key_env": None}
    with pytest.raises(ConfigError, match="only generated tasks have an expert"):
        ColBenchDemonstrator(EnvironmentConfig("colbench", {"tasks": {"train": str(file)}, "human": human}))


def test_demonstrations_are_kept_for_the_same_seed_and_length_only():
    marks = []
    for change in ({}, {"seed": 1}, {"model": {"max_seq_len": 2048}}, {}):
        cfg = OmegaConf.merge(compose("colbench_cpu", recipe="warm_start_appworld"), change)
        marks.append(WarmStartRecipe(cfg)._fingerprint())
    assert marks[0] == marks[3]
    assert len(set(marks)) == 3
