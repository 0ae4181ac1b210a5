"""The table of what a policy fails at."""

import json
from pathlib import Path

import pytest

from experiments.ceiling import cost_of_a_failed_turn, departure, lines, main, table

LOOK_UP = (
    "for n in apis.simple_note.search_notes(query='safe', access_token=t):\n    print(n['title'] + ':', n['note_id'])"
)
READ = "print(apis.simple_note.show_note(note_id=104, access_token=t)['content'])"
REFERENCE = [LOOK_UP, READ, "apis.supervisor.complete_task(answer=490)"]


def test_the_first_departure_is_named():
    assert departure(REFERENCE, REFERENCE) == "none"
    assert departure([LOOK_UP, READ.replace("104", "10"), "1"], REFERENCE) == "simple_note.show_note: note_id"
    assert departure([LOOK_UP, READ.replace("note_id=104, ", "")], REFERENCE) == "simple_note.show_note: note_id"
    assert departure([LOOK_UP, READ.replace("104", "look 1")], REFERENCE) == "simple_note.show_note: no Python"
    assert departure([READ], REFERENCE) == "simple_note.search_notes not called"
    assert departure([LOOK_UP], REFERENCE) == "stopped before simple_note.show_note"
    assert departure([LOOK_UP.replace("n[", "m["), READ, REFERENCE[2].replace("490", "49")], REFERENCE) == (
        "supervisor.complete_task: answer"
    )


def test_rollouts_are_counted_by_template(tmp_path: Path):
    truth = tmp_path / "a_1" / "ground_truth"
    truth.mkdir(parents=True)
    (truth / "turns.json").write_text(json.dumps([{"thought": "", "code": code} for code in REFERENCE]))
    (truth / "demonstration.json").write_text(json.dumps({"template": "note_read", "difficulty": 2}))

    def rollout(codes: list[str], success: bool) -> dict:
        said = [{"role": "assistant", "content": f"```python\n{code}\n```"} for code in codes]
        messages = [{"role": "user", "content": "Task"}, *said]
        turns = [{"message": 1 + number} for number in range(len(codes))]
        return {"task_id": "a_1", "messages": messages, "turns": turns, "success": success}

    rows = table([rollout(REFERENCE, True), rollout(REFERENCE[:1], False), rollout(REFERENCE[:1], False)], tmp_path)
    assert list(lines(rows))[2:] == ["| note_read | 2 | 1 of 3 | stopped before simple_note.show_note (2) |"]


def test_a_failed_turn_is_one_with_an_error_or_without_code():
    def rollout(turns: list[tuple[str, str]], success: bool) -> dict:
        messages = [{"role": "user", "content": "Task"}]
        for text, observation in turns:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": observation}]
        return {"messages": messages, "turns": [{"message": 1 + 2 * i} for i in range(len(turns))], "success": success}

    fine, error = ("```python\n1\n```", "1"), ("```python\n1/0\n```", "Execution failed. Traceback:\n...")
    mute = ("I think.", "No code available to execute.")
    rollouts = [rollout([fine, fine], True), rollout([fine], False), rollout([fine, error, fine], True)]
    rollouts += [rollout([mute, fine], False), rollout([error], False)]
    assert list(cost_of_a_failed_turn(rollouts))[2:] == [
        "| without a failed turn | 1 of 2 |",
        "| with one or more | 1 of 3 |",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "No such file"), ("xx\n", "log.jsonl:1 is no JSON object"), ("{}\n", "a line lacks 'task_id'")],
)
def test_what_is_no_log_is_one_line(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "log.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=rf"^ceiling: .*{message}"):
        main([str(tmp_path / "log.jsonl")])
