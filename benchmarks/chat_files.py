"""Read files of chats as other programs write them: the turns learned of each, or the line that refuses it.

    python benchmarks/chat_files.py [--json PATH] [--only WORDS]

The files are written on the spot, each in the form of the program that its name begins with; the form is theirs, the
words are not. Each is read as `loop sft data=FILE` reads it, without a model. ``learned`` is the text of the turns that
are learned, ``told`` the run's message about it. A file whose words are not learned as they are written here must say
why in one line. The exit status is 1 where a file's verdict is not as expected: nothing may be silent.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

from loop_formats.schema import ConfigError
from loop_recipes.rollouts.chats import read_chat_set
from model_families.chat import open_chat
from model_families.chat.format import ChatFormat
from support.random_policy import write_tokenizer

USER, SAID = {"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN, GPT = {"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
TOOL = {"type": "function", "function": ADD}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "4"}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'
AS_VALUE = '{"name": "add", "arguments": {"a": 2}}'
AGENT = {"name": "harbor", "version": "1", "model_name": "m"}


def atif(*steps: dict[str, Any], **agent: Any) -> dict[str, Any]:
    """Return a trajectory as Harbor writes it."""
    numbered = [{"step_id": number, "timestamp": "2026-01-01", **step} for number, step in enumerate(steps, 1)]
    return {"schema_version": "ATIF-v1.6", "session_id": "s", "agent": {**AGENT, **agent}, "steps": numbered}


ASKED, ANSWERED = {"source": "user", "message": "Two and two?"}, {"source": "agent", "message": "Four."}
ACTED = {
    "source": "agent",
    "message": "",
    "tool_calls": [{"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 2}}],
    "observation": {"results": [{"source_call_id": "c1", "content": "4"}]},
}


@dataclass(frozen=True)
class Expected:
    """A file, and its expected result: the texts that are learned, and words of the run's line on it.

    ``content`` are records, one a line, or the bytes of the file. Without ``learned`` the line refuses the file.
    """

    content: Sequence[dict[str, Any]] | bytes
    learned: Sequence[str] = ()
    line: str = ""
    suffix: str = "jsonl"


def plain(*messages: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return a record of messages."""
    return [{"messages": list(messages), **more}]


def shared(*turns: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    """Return a record of conversations."""
    return [{"conversations": list(turns), **more}]


def lines(records: Sequence[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


NO_FORM = "no messages, conversations, steps of ATIF or traces among its fields"
TWO_CALLS = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "c2"}]}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
FILES = {
    "openai_chat": Expected(plain(SYSTEM, USER, SAID), ["Four."]),
    "openai_weight": Expected(plain(USER, {**SAID, "weight": 0}, USER, SAID), ["Four."]),
    "openai_tools": Expected(plain(USER, CALLED, RESULT, SAID, tools=[TOOL]), [HERMES, "Four."]),
    "openai_parallel": Expected(
        plain(USER, TWO_CALLS, {**RESULT, "tool_call_id": "c2"}, RESULT, SAID, parallel_tool_calls=True, tools=[TOOL]),
        [f"{HERMES}\n{HERMES}", "Four."],
        "not read: parallel_tool_calls (1 of 1)",
    ),
    "openai_image": Expected(plain(IMAGE, SAID), line="only text can be learned from"),
    "openai_preference": Expected([{"input": {"messages": [USER]}, "preferred_output": [SAID]}], line=NO_FORM),
    "openai_stored_completion": Expected([{"request": {"messages": [USER]}, "response": {}}], line=NO_FORM),
    "sharegpt": Expected(shared(HUMAN, GPT), ["Four."]),
    "sharegpt_system": Expected(shared(HUMAN, GPT, system="Be brief."), ["Four."]),
    "sharegpt_hermes": Expected(
        shared(HUMAN, {**GPT, "value": HERMES}, {"from": "tool", "value": "<tool_response>\n4\n</tool_response>"}, GPT),
        [HERMES, "Four."],
        "<tool_call> in the text of 1 of 2 turns (50%) is learned as text: the conversation has no tools",
    ),
    "sharegpt_empty": Expected(shared(HUMAN, {**GPT, "value": ""}), line="none of 1 conversations has a turn"),
    "sharegpt_gzip": Expected(gzip.compress(lines(shared(HUMAN, GPT))), ["Four."], suffix="jsonl.gz"),
    "sharegpt_utf16": Expected(lines(shared(HUMAN, GPT)).decode().encode("utf-16"), ["Four."], suffix="json"),
    "sharegpt_lines": Expected(lines(shared(HUMAN, GPT) * 2), ["Four.", "Four."], suffix="json"),
    "sharegpt_latin": Expected('{"conversations": "é"}'.encode("latin-1"), line="is not UTF-8"),
    "axolotl_train": Expected(plain(USER, {**SAID, "train": False}, USER, {**SAID, "train": True}), ["Four."]),
    "axolotl_training": Expected(plain(USER, {**SAID, "training": False}, USER, SAID), ["Four."]),
    "axolotl_detail": Expected(
        plain(USER, {**SAID, "train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}),
        ["Four."],
        "not read: messages[].train_detail (1 of 1)",
    ),
    "axolotl_alpaca": Expected([{"instruction": "Two and two?", "input": "", "output": "Four."}], line=NO_FORM),
    "axolotl_templated": Expected(
        plain(USER, {**SAID, "content": "Four.<|im_end|>"}),
        ["Four.<|im_end|>"],
        "<|im_end|> in the text of 1 of 1 turns (100%) is learned as text",
    ),
    "llamafactory_tools": Expected(
        shared(
            HUMAN,
            {"from": "function_call", "value": AS_VALUE},
            {"from": "observation", "value": "4"},
            GPT,
            tools=json.dumps([ADD]),
        ),
        [HERMES, "Four."],
    ),
    "llamafactory_calls": Expected(
        shared(HUMAN, {"from": "function_call", "value": f"[{AS_VALUE}, {AS_VALUE}]"}, tools=json.dumps([ADD])),
        [f"{HERMES}\n{HERMES}"],
    ),
    "llamafactory_images": Expected(shared(HUMAN, GPT, images=["a.png"]), ["Four."], "not read: images (1 of 1)"),
    "llamafactory_kto": Expected(plain(USER, SAID, label=False), ["Four."], "not read: label (1 of 1)"),
    "llamafactory_preference": Expected(
        [{"conversations": [HUMAN], "chosen": GPT, "rejected": GPT}], line="no assistant"
    ),
    "swift_loss": Expected(plain(USER, {**SAID, "loss": False}, USER, {**SAID, "loss": True}), ["Four."]),
    "swift_tool_call": Expected(
        plain(USER, {"role": "tool_call", "content": AS_VALUE}, {"role": "tool_response", "content": "4"}, SAID),
        [HERMES, "Four."],
    ),
    "swift_rejected": Expected(plain(USER, SAID, rejected_response="Five."), ["Four."], "not read: rejected_response"),
    "swift_query": Expected([{"query": "Two and two?", "response": "Four."}], line=NO_FORM),
    "trl_prompt_completion": Expected([{"prompt": [USER], "completion": [SAID]}], ["Four."]),
    "trl_template_words": Expected(
        plain(USER, SAID, chat_template_kwargs={"thinking": False}), ["Four."], "not read: chat_template_kwargs"
    ),
    "trl_preference": Expected([{"prompt": [USER], "chosen": [SAID], "rejected": [SAID]}], line=NO_FORM),
    "trl_text": Expected([{"prompt": "Two and two?", "completion": "Four."}], line=NO_FORM),
    "verl_multiturn": Expected(
        plain(USER, CALLED, RESULT, SAID, tools=[TOOL], enable_thinking=False),
        [HERMES, "Four."],
        "not read: enable_thinking",
    ),
    "verl_table": Expected(
        plain(USER, {**CALLED, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": None}}}]}),
        [HERMES],
    ),
    "verl_prompts": Expected([{"data_source": "x", "prompt": [USER], "reward_model": {}}], line=NO_FORM),
    "harbor_atif": Expected([atif(ASKED, ACTED, ANSWERED, tool_definitions=[TOOL])], [HERMES, "Four."]),
    "harbor_copied": Expected([atif(ASKED, {**ANSWERED, "is_copied_context": True}, ASKED, ANSWERED)], ["Four."]),
    "harbor_no_model": Expected([atif(ASKED, {**ANSWERED, "llm_call_count": 0}, ASKED, ANSWERED)], ["Four."]),
    "harbor_ids": Expected(
        [atif(ASKED, {**ANSWERED, "metrics": {"prompt_token_ids": [1.5], "completion_token_ids": [7]}})],
        line="steps[1].metrics.prompt_token_ids[0] is 1.5",
    ),
    "harbor_nested": Expected(
        [atif(ASKED, ANSWERED) | {"continued_trajectory_ref": "b.json"}],
        ["Four."],
        "not read: continued_trajectory_ref",
    ),
    "tracker_langsmith": Expected([{"inputs": {"messages": [USER]}, "outputs": {}, "run_type": "llm"}], line=NO_FORM),
    "tracker_langfuse": Expected([{"input": [USER], "output": SAID, "observations": []}], line=NO_FORM),
    "tracker_weave": Expected(plain(USER, SAID, feedback={"stars": 1}), ["Four."], "not read: feedback (1 of 1)"),
    "tracker_row": Expected([{"messages": json.dumps([USER, SAID]), "score": 0.5}], ["Four."], "not read: score"),
}


@dataclass
class Row:
    """The result of a file."""

    file: str
    learned: list[str]
    told: str
    verdict: str


def judged(name: str, folder: Path, tokens: ChatFormat) -> Row:
    """Read a file."""
    expected = FILES[name]
    file = folder / f"{name}.{expected.suffix}"
    file.write_bytes(expected.content if isinstance(expected.content, bytes) else lines(expected.content))
    try:
        chats = read_chat_set([str(file)], tokens, "all", 0.0)
    except ConfigError as error:
        message = str(error).replace(f"{folder}/", "")
        one_line = not expected.learned and expected.line in message and "\n" not in message
        return Row(file.name, [], message, "refused in one line" if one_line else "REFUSED OTHERWISE")
    texts = [
        tokens.decode(tokens.without_stop(rollout.token_ids[turn.start : turn.end]))
        for rollout in chats.rollouts
        for turn in rollout.turns
    ]
    message = "; ".join(chats.notes)
    silent = bool(message) and not expected.line  # a needless message is as wrong as silence
    well = texts == list(expected.learned) and expected.line in message and not silent
    return Row(file.name, texts, message, "taken" if well else "TAKEN OTHERWISE")


def main(arguments: list[str] | None = None) -> int:
    """Print a row for each file; returns 1 where a verdict is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH")
    parser.add_argument("--only", default="", metavar="WORDS", help="files whose names hold one of these words")
    options = parser.parse_args(arguments)
    names = [name for name in FILES if not options.only or any(word in name for word in options.only.split())]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        tokens = open_chat(Path(folder))
        for name in names:
            row = judged(name, Path(folder), tokens)
            rows.append(row)
            print(f"{row.file:32}{row.verdict:21}{' | '.join(row.learned)!r}  {row.told}", flush=True)
    good = sum(row.verdict in ("taken", "refused in one line") for row in rows)
    print(f"{good} of {len(rows)} files as expected")
    if options.json is not None:
        options.json.write_text(json.dumps({"files": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
