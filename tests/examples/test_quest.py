"""The second game: who fetches the key opens each chest, and who only names rooms, or none, does not."""

import pytest

from support.experiment_scripts import load_script
from support.texts import texts_beside

TABLES = texts_beside(__file__)

quest = load_script("examples/quest.py")


def play(task: dict, things: str) -> tuple[float, list[str | None]]:
    """The reward of an agent that goes where these things are, again and again, and what it was answered."""
    game = quest.House()
    game.reset(task)
    answers = []
    for turn in range(quest.TURNS):
        thing = things.split()[turn % len(things.split())]
        answers.append(game.go(f"I go to the {task['rooms'].get(thing, 'sea')}."))
        if answers[-1] is None:
            break
    return quest.half_for_the_key(game), answers


@pytest.mark.parametrize(("things", "reward", "turns"), TABLES["a_game"])
def test_a_game(things, reward, turns):
    for task in quest.TASKS:
        earned, answers = play(task, things)
        assert (earned, len(answers)) == (reward, turns)
        assert answers[-1] is None


def test_what_is_told():
    task = quest.TASKS[0]
    _, (locked, _, taken, away, _) = play(task, "chest cat key nothing chest")
    rooms = task["rooms"]
    assert locked == f"You are in the {rooms['chest']}. The chest is locked. {quest.ASK}"
    assert taken == f"You are in the {rooms['key']}. You take the key. {quest.ASK}"
    assert away == f"You stay. {quest.ASK}"
    assert all(f"The {thing} is in the {room}." in task["question"] for thing, room in rooms.items())
