import json
from pathlib import Path

import pytest

from appworld_adapter import prompt as prompt_module
from appworld_adapter.prompt import Prompt, TaskCard, task_lines
from support.texts import texts_beside

TABLES = texts_beside(__file__)

GOLDEN = Path(__file__).parent / "golden"
CARD = TaskCard(
    "abc_1", "Set my Spotify volume to 5.", "Ada", "Bo", "ada@example.com", "5550001111", "2023-05-18T15:38:00"
)


def rendered(name):
    return "\n".join(f"<{message.role}>\n{message.content}" for message in Prompt(name).messages(CARD)) + "\n"


@pytest.mark.parametrize("name", ["loop", "tiny"])
def test_golden(name):
    assert rendered(name) == (GOLDEN / f"prompt_{name}.txt").read_text()


def test_structure_of_the_paper():
    messages = Prompt("loop").messages(CARD)
    roles = [message.role for message in messages]
    assert len(roles) == 24
    assert roles[:2] == ["system", "user"]
    assert roles[-2:] == ["user", "user"]
    worked_example = roles[2:-2]
    assert worked_example == ["assistant", "user"] * (len(worked_example) // 2)
    assert "complete_task" in messages[-4].content
    explanation = messages[1].content
    for api in ("show_app_descriptions", "show_api_descriptions", "show_api_doc"):
        assert f"apis.api_docs.{api}(" in explanation
    assert not any("{{" in message.content for message in messages)
    assert messages[-1].content == "Using these APIs, now generate code to solve the actual task:\n\n" + task_lines(
        CARD
    )


def test_the_prompt_says_what_the_papers_says_and_teaches_nothing_that_should_be_learned():
    """LOOP, section 5.5: not to make values up and not to give up are learned."""
    instructions = Prompt("loop").messages(CARD)[-2].content.lower()
    assert "always look at the specification of an api" in instructions
    for learned in ("status='fail'", "make up", "invent", "guess", "assum", "dummy", "placeholder", "give up"):
        assert not any(learned in message.content.lower() for message in Prompt("loop").messages(CARD)), learned


def test_tiny_is_short():
    assert sum(len(message.content.split()) for message in Prompt("tiny").messages(CARD)) < 80


def test_card_is_read_from_the_specification(tmp_path):
    folder = tmp_path / "data" / "tasks" / "abc_1"
    folder.mkdir(parents=True)
    supervisor = {"first_name": "Ada", "last_name": "Bo", "email": "ada@example.com", "phone_number": "5550001111"}
    specs = {"instruction": CARD.instruction, "supervisor": supervisor, "datetime": "2023-05-18 15:38:00"}
    (folder / "specs.json").write_text(json.dumps(specs))
    assert TaskCard.load(tmp_path, "abc_1") == CARD


@pytest.mark.parametrize(("text", "complaint"), TABLES["bad_templates_are_named"])
def test_bad_templates_are_named(tmp_path, monkeypatch, text, complaint):
    monkeypatch.setattr(prompt_module, "PROMPT_FOLDER", tmp_path)
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Prompt("bad")


@pytest.mark.parametrize("name", ["missing", "../prompts/loop"])
def test_unknown_prompt_names_those_there_are(name):
    with pytest.raises(ValueError, match="there are loop, tiny"):
        Prompt(name)
