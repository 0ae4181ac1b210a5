"""The parts of the synthetic world's generator that need no engine: people, scenarios, grading rules, flaws."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from agent_environments.agent_turns import AgentTurn
from agent_environments.extraction import code_blocks
from appworld_adapter import flaws
from appworld_adapter.behavior import AppWorldBehavior
from appworld_adapter.worker.synthetic import evaluation_program, people
from support.texts import texts_beside
from support.waiting import COMMAND_S

TABLES = texts_beside(__file__)

GENERATOR = Path(people.__file__).with_name("generate.py")

TURNS = TABLES["turns"]
DEMONSTRATION = TABLES["demonstration"]


def test_people_are_distinct_and_stay_in_their_pool():
    population = people.draw_population(64, seed=3)
    everybody = population.people
    assert len({person.email for person in everybody}) == len(everybody) == 64
    assert len({person.phone_number for person in everybody}) == 64
    passwords = [word for person in everybody for word in person.passwords.values()]
    assert len(set(passwords)) == len(passwords)
    for pool in population.pools.values():
        members = {person.email for person in pool}
        for person in pool:
            assert [name for name, _ in population.contacts[person.email]] == list(people.RELATIONSHIPS)
            assert {other.email for other in population.others(person)} <= members - {person.email}


def test_relationships_are_mutual():
    population = people.draw_population(48, seed=0)
    for person in population.people:
        for relationship, other in population.contacts[person.email]:
            assert population.contact(other, relationship) is person


@pytest.mark.parametrize("size", [10, 49])
def test_too_few_people_are_refused_with_the_cure(size):
    with pytest.raises(ValueError, match="even number of at least"):
        people.draw_population(size, seed=0)


def test_people_do_not_depend_on_the_hash_seed():
    program = "import people; print(people.draw_population(48, 7))"
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=GENERATOR.parent,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=COMMAND_S,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1


def test_generator_refuses_bad_arguments_before_it_loads_the_engine(tmp_path):
    command = [sys.executable, str(GENERATOR), "--root", str(tmp_path / "w"), "--people", "7"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert finished.returncode != 0
    assert finished.stderr.strip().splitlines()[-1].startswith("generate.py: --people 7 is too small or odd")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("content", "text"), [("notes.txt", "mine"), ("dataset.json", '{"name": "other"}')])
def test_generator_leaves_a_folder_of_something_else_alone(tmp_path, content, text):
    (tmp_path / content).write_text(text)
    command = [sys.executable, str(GENERATOR), "--root", str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
    assert finished.returncode == 1
    said = "holds something other than a synthetic world; give another folder"
    assert finished.stderr == f"generate.py: --root {tmp_path} {said}\n"
    assert (tmp_path / content).read_text() == text


def test_generator_says_that_a_folder_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    root = tmp_path / "file" / "worlds" / "synthetic"
    finished = subprocess.run(
        [sys.executable, str(GENERATOR), "--root", str(root)], capture_output=True, text=True, timeout=COMMAND_S
    )
    assert finished.stderr == f"generate.py: --root {root} cannot be created: Not a directory; give another folder\n"


class Recorder:
    """Stands in for the engine's test tracker: keeps which requirements held."""

    def __init__(self):
        self.passed = {}

    def __call__(self, requirement):
        self.requirement = requirement
        return self

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.passed[self.requirement] = error is None
        return True

    def case(self, left, relation, right):
        assert {"==": left == right, ">=": left >= right if relation == ">=" else None}[relation]

    def answer(self, given, expected):
        assert str(given).lower() == str(expected).lower()


def graded(requirements, changes, status=None, answer="<<NOT_GIVEN>>", expected=None):
    """Which of ``requirements`` hold after ``changes``: model name -> (added, updated, removed) records."""
    task = SimpleNamespace(status=status, answer=json.dumps(answer))
    task_model = SimpleNamespace(first=lambda: task)
    models = SimpleNamespace(
        changed_model_names=lambda: {name for name, records in changes.items() if any(records)},
        changed_records=lambda name: changes.get(name, ([], [], [])),
        end=SimpleNamespace(supervisor=SimpleNamespace(Task=task_model)),
    )
    recorder = Recorder()
    evaluation_program.evaluate(recorder, {}, {"requirements": requirements}, None, models, expected)
    return [recorder.passed[requirement["text"]] for requirement in requirements]


PAYMENT = TABLES["payment"]


def transaction(amount, sender_id=1):
    return SimpleNamespace(id=9, sender_id=sender_id, amount=amount)


def test_payment_is_graded_in_parts():
    right = {"venmo.Transaction": ([transaction(12.0)], [], [])}
    assert graded(PAYMENT, {}) == [True, False, False]
    assert graded(PAYMENT, right) == [True, True, False]
    assert graded(PAYMENT, right, "success", None) == [True, True, True]
    assert graded(PAYMENT, {"venmo.Transaction": ([transaction(13)], [], [])}, "success", None) == [True, True, False]
    assert graded(PAYMENT, right | {"phone.Alarm": ([], [], [transaction(1)])}, "success", None) == [False, True, True]
    twice = {"venmo.Transaction": ([transaction(12), transaction(12)], [], [])}
    assert graded(PAYMENT, twice, "success", None) == [False, False, False]


def test_completing_or_answering_alone_is_paid_no_more_than_doing_nothing():
    nothing = graded(PAYMENT, {})
    for status, answer in (("success", None), ("fail", None), ("success", "12")):
        assert graded(PAYMENT, {}, status, answer) == nothing


def test_question_is_graded_in_parts():
    requirements = [
        {"kind": "only", "text": "only", "allowed": {}},
        {"kind": "answer_among", "text": "among", "candidates": [12, 15]},
        {"kind": "answer", "text": "answer"},
    ]
    assert graded(requirements, {}, expected=12) == [True, False, False]
    assert graded(requirements, {}, "success", None, expected=12) == [True, False, False]
    assert graded(requirements, {}, "success", 15, expected=12) == [True, True, False]
    assert graded(requirements, {}, "success", "12", expected=12) == [True, True, True]


def test_every_flaw_changes_the_turns_and_keeps_the_originals():
    before = json.dumps(TURNS)
    for flaw in flaws.possible_flaws(DEMONSTRATION):
        for seed in range(5):
            flawed = flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(seed), flaw)
            assert flawed != TURNS
            assert flawed == flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(seed), flaw)
            assert flawed[-1]["code"].startswith("apis.supervisor.complete_task(")
    assert json.dumps(TURNS) == before


def test_placeholder_password_skips_the_look_up_and_gives_up():
    flawed = flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(0), "placeholder_password")
    assert [turn["code"] for turn in flawed] == [
        "phone_token = apis.phone.login(username='555', password='password123')",
        "apis.supervisor.complete_task()",
    ]


def test_wrong_value_replaces_one_literal_only():
    codes = {
        flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(seed), "wrong_value")[3]["code"] for seed in range(20)
    }
    assert codes == {
        "apis.phone.update_alarm(alarm_id=11, time='10:10', access_token=phone_token)",
        "apis.phone.update_alarm(alarm_id=10, time='09:00', access_token=phone_token)",
    }


def test_skipped_lookup_guesses():
    flawed = flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(1), "skipped_lookup")
    assert not any("show_alarms" in turn["code"] for turn in flawed)
    assert len(flawed) == len(TURNS) - 1


def flawed_codes(flaw: str, roles: list[str] | None = None) -> list[str]:
    demonstration = DEMONSTRATION | {"roles": roles or DEMONSTRATION["roles"]}
    return [turn["code"] for turn in flaws.flawed_turns(TURNS, demonstration, random.Random(0), flaw)]


def test_several_cells_write_the_password_before_it_was_seen():
    both, giving_up = flawed_codes("several_cells")
    assert code_blocks(f"I do both.\n```python\n{both}\n```") == [
        "print(apis.supervisor.show_account_passwords())",
        "phone_token = apis.phone.login(username='555', password='password123')",
    ]
    assert giving_up == "apis.supervisor.complete_task()"


def test_an_assumed_value_is_one_that_a_look_up_would_have_found():
    codes = flawed_codes("assumed_value")
    assert codes == [
        TURNS[0]["code"],
        TURNS[1]["code"],
        "apis.phone.update_alarm(alarm_id=1, time='10:10', access_token=phone_token)",
        "apis.supervisor.complete_task()",
    ]
    quoting = [turn | {"thought": f"so time: 10:10. {turn['thought']}"} for turn in TURNS]
    assuming = flaws.flawed_turns(quoting, DEMONSTRATION, random.Random(0), "assumed_value")[2]
    assert assuming["thought"] == "so time: 10:10. I assume it is 1", "other values are quoted as they were"
    unfound = DEMONSTRATION | {"slips": [slip | {"found": False} for slip in DEMONSTRATION["slips"]]}
    assert "assumed_value" not in flaws.possible_flaws(unfound)


def test_a_guessed_interface_is_a_wrong_parameter_without_the_documentation():
    assert "guessed_interface" not in flaws.possible_flaws(DEMONSTRATION)
    codes = flawed_codes("guessed_interface", ["docs", "login", "lookup", "act", "complete"])
    assert codes == [
        TURNS[1]["code"],
        TURNS[2]["code"],
        "apis.phone.update_alarm(data=10, time='10:10', access_token=phone_token)",
        "apis.supervisor.complete_task()",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_after_a_corrected_error_the_agent_does_what_it_had_left_out(seed):
    demonstration = DEMONSTRATION | {"roles": ["docs", *DEMONSTRATION["roles"]]}
    demonstration["slips"] = [slip | {"turn": slip["turn"] + 1} for slip in DEMONSTRATION["slips"]]
    docs = {"thought": "I look it up.", "code": "show_api_doc()"}
    codes = [
        turn["code"]
        for turn in flaws.flawed_turns([docs, *TURNS], demonstration, random.Random(seed), flaws.CORRECTED_ERROR)
    ]
    right = [docs["code"], *(turn["code"] for turn in TURNS)]
    assert [code for code in codes if code in right][-2:] == right[-2:]
    assert set(right) <= set(codes)
    assert sum(code not in right for code in codes) == 1


def test_each_habit_shows_in_its_behaviour_figure():
    def figures(flaw: str | None) -> dict[str, int]:
        turns = flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(0), flaw) if flaw else TURNS
        said = [f"{turn['thought']}\n```python\n{turn['code']}\n```" for turn in turns]
        return AppWorldBehavior().counts([AgentTurn(text, ".") for text in said])

    assert [figures(None)[name] for name in ("dummy", "assume", "multiple_cell_turns")] == [0, 0, 0]
    assert figures("placeholder_password")["dummy"] == 1
    assert figures("several_cells")["multiple_cell_turns"] == 1
    assert figures("assumed_value")["assume"] == 1


def test_impossible_flaw_is_refused():
    assert "wrong_answer" not in flaws.possible_flaws(DEMONSTRATION)
    with pytest.raises(ValueError, match="wrong_answer"):
        flaws.flawed_turns(TURNS, DEMONSTRATION, random.Random(0), "wrong_answer")
