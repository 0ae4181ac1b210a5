"""Whole agents as their packages publish them, on a small task, with a scripted policy behind the node's endpoint.

Nothing here knows how an agent is started: that is what is tried, by its name or by the script of docs/agents.md.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from loop_formats.collection_request import Limits
from loop_formats.rollout import Rollout
from loop_plumbing.plug_ins import plug_ins
from support.chat_tokenizers import write_qwen3
from support.counter_node import counter_request, local_node
from support.fake_vllm import Sampled
from support.random_policy import write_adapter, write_model

CONTEXT, VOCABULARY = 131_072, 151_936
TASK = "fix_1"
WRONG, RIGHT = "return a - b", "return a + b"
FILES = {
    "prompt.md": "The test in this folder fails. Mend counter.py so that it passes.\n",
    "counter.py": f"def add(a, b):\n    {WRONG}\n",
    "test_counter.py": "import unittest\n\nfrom counter import add\n\n\nclass TestAdd(unittest.TestCase):\n"
    "    def test_add(self):\n        self.assertEqual(add(2, 3), 5)\n",
}
GRADE = [
    sys.executable,
    "-c",
    "import json, os; left = open(os.environ['EPISODE_FOLDER'] + '/counter.py').read(); "
    f"print(json.dumps({{'reward': float({RIGHT!r} in left)}}))",
]
FOLDER = re.compile(r"/[^\s\"'<>]*/harness-[^/\s\"'<>]+/episode")
MAKING_S = 900.0
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"
SIDE_CALLS = [{"system": "You are a title generator"}, {"system": "You are an expert software engineer that generates"}]
"""The rules of the page."""

Calls = Sequence[tuple[str, Mapping[str, Any]] | str]
"""What the policy says, turn by turn: calls of the agent's tools, or a text, which ends it."""


def shell(name: str, key: str, **more: Any) -> Callable[[str], Calls]:
    """The task by a shell alone: list, read, edit, test, done."""
    commands = ["pwd; ls -la", "cat counter.py test_counter.py", f"sed -i 's/{WRONG}/{RIGHT}/' counter.py"]
    commands.append(f"{sys.executable} -m unittest -q")
    return lambda folder: [*((name, {key: command, **more}) for command in commands), "The test passes now."]


@dataclass(frozen=True)
class Played:
    """How an agent is installed into a folder, where its program is then, and what the policy says to it.

    ``packages`` are npm's where ``python`` is None, else Python's, for that version.
    """

    packages: Sequence[str]
    program: str
    says: Callable[[str], Calls]
    python: str | None = None


def by_tools(
    shell_tool: str, reader: str, editor: str, keys: tuple[str, str, str], **more: Any
) -> Callable[[str], Calls]:
    """The task by tools of the agent: list, read, edit, test, done.

    ``keys`` are the editor's names of file, old and new text; ``more`` what a tool is told beside, by its name.
    """
    test = f"{sys.executable} -m unittest -q"

    def says(folder: str) -> Calls:
        file = {keys[0]: f"{folder}/counter.py"}
        edit = {**file, keys[1]: WRONG, keys[2]: RIGHT}
        calls = [(shell_tool, {"command": "ls -la"}), (reader, file), (editor, edit), (shell_tool, {"command": test})]
        return [*((name, {**arguments, **more.get(name, {})}) for name, arguments in calls), "The test passes now."]

    return says


SNAKE, CAMEL = ("file_path", "old_string", "new_string"), ("filePath", "oldString", "newString")


def _mini(folder: str) -> Calls:
    *work, _ = shell("bash", "command")(folder)
    return [*work, ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"})]


def _openhands(folder: str) -> Calls:
    edit = {"command": "str_replace", "path": f"{folder}/counter.py", "old_str": WRONG, "new_str": RIGHT}
    return [
        ("terminal", {"command": "ls -la"}),
        ("file_editor", {"command": "view", "path": f"{folder}/counter.py", "view_range": None}),
        ("file_editor", edit),
        ("terminal", {"command": f"{sys.executable} -m unittest -q"}),
        ("finish", {"message": "The test passes now."}),
    ]


def _cline(folder: str) -> Calls:
    *work, _ = shell("run_commands", "commands")(folder)
    calls = [(name, {"commands": [arguments["commands"]]}) for name, arguments in work]  # type: ignore[misc]
    return [*calls, ("submit_and_exit", {"summary": "The test passes now.", "verified": True})]


def _aider(folder: str) -> Calls:
    return [f"counter.py\n```\n{FILES['counter.py'].replace(WRONG, RIGHT)}```"]


_claude = by_tools("Bash", "Read", "Edit", SNAKE, Bash={"description": "work", "timeout": 20000.0})
_gemini = by_tools("run_shell_command", "read_file", "replace", SNAKE, replace={"instruction": "mend"})
_qwen = by_tools("run_shell_command", "read_file", "edit", SNAKE, run_shell_command={"is_background": False})
_opencode = by_tools("bash", "read", "edit", CAMEL, bash={"description": "work", "timeout": 20000.0})

AGENTS = {
    "codex": Played(["@openai/codex@0.169.0"], "node_modules/.bin/codex", shell("exec_command", "cmd")),
    "claude-code": Played(["@anthropic-ai/claude-code@2.1.328"], "node_modules/.bin/claude", _claude),
    "gemini-cli": Played(["@google/gemini-cli@0.61.0"], "node_modules/.bin/gemini", _gemini),
    "mini-swe-agent": Played(["mini-swe-agent==2.4.6"], "bin/mini", _mini, python="3.11"),
    "openhands-sdk": Played(
        ["openhands-sdk==1.58.0", "openhands-tools==1.58.0"], "bin/python", _openhands, python="3.12"
    ),
    "opencode": Played(["opencode-ai@1.18.33"], "node_modules/.bin/opencode", _opencode),
    "qwen-code": Played(["@qwen-code/qwen-code@0.24.4"], "node_modules/.bin/qwen", _qwen),
    "pi": Played(["@mariozechner/pi-coding-agent@0.73.1"], "node_modules/.bin/pi", shell("bash", "command")),
    "cline": Played(["cline@3.0.65"], "node_modules/.bin/cline", _cline),
    "aider": Played(["aider-chat==0.86.2"], "bin/aider", _aider, python="3.11"),
}


def environment_of(name: str, program: str) -> dict[str, Any]:
    """The keys of a harness that start an agent: its name, or the script of the page."""
    if name in plug_ins("agents"):
        return {"agent": name, "agent_program": program}
    found = re.search(rf"^\*\*{name}\*\*.*?^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{PAGE} says how {name} is started"
    path = f"{Path(program).parent}:{os.environ['PATH']}"
    return {"command": ["bash", "-c", found[1]], "variables": {"PATH": path}, "side_calls": SIDE_CALLS}


def install(name: str, folder: Path) -> str:
    """Install an agent into ``folder``, by npm or uv, unless it is there; returns its program.

    Raises:
        CalledProcessError, TimeoutExpired: it cannot be installed, as without the package index.
    """
    agent = AGENTS[name]
    program = folder / agent.program
    if not program.exists():
        commands = [["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", *agent.packages]]
        if agent.python is not None:
            beside = Path(sys.executable).with_name("uv")
            uv = str(beside) if beside.exists() else "uv"
            python = str(folder / "bin" / "python")
            commands = [
                [uv, "venv", "--quiet", "--allow-existing", "--python", agent.python, str(folder)],
                [uv, "pip", "install", "--quiet", "--python", python, *agent.packages],
            ]
        folder.mkdir(parents=True, exist_ok=True)
        for command in commands:
            subprocess.run(command, check=True, timeout=MAKING_S, capture_output=True)
    return str(program)


def write_policy(folder: Path) -> Path:
    """A random model with room for an agent's first prompt and Qwen's vocabulary, and its adapter."""
    write_model(folder / "model", positions=CONTEXT)
    write_adapter(folder / "adapter0", seed=0)
    write_qwen3(folder / "qwen3")
    shutil.copy(folder / "qwen3" / "tokenizer.json", folder / "model" / "tokenizer.json")
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": VOCABULARY}))
    return folder


def write_task(root: Path) -> Path:
    """The task's files, as a repository of git's; returns the folder of all tasks."""
    folder = root / TASK
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-q", "-m", "begin"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)
    return root


@dataclass(frozen=True)
class Outcome:
    """What became of an agent's episode. ``stored`` tokens are those of all sequences, ``computed`` those that are
    left where shared beginnings are computed once."""

    agent: str
    sequences: int
    turns: int
    first_prompt: int
    stored: int
    computed: int
    reward: float
    end_reason: str
    exit_status: int | None
    calls: Mapping[str, int] = field(default_factory=dict)
    refusals: Sequence[Any] = ()
    output: str = ""

    @classmethod
    def of(cls, agent: str, rollouts: Sequence[Rollout]) -> Outcome:
        first, notes = rollouts[0], rollouts[0].extra["harness"]
        return cls(
            agent,
            len(rollouts),
            sum(len(rollout.turns) for rollout in rollouts),
            first.turns[0].start,
            sum(len(rollout.token_ids) for rollout in rollouts),
            computed_tokens([rollout.token_ids for rollout in rollouts]),
            first.reward,
            first.end_reason,
            notes["exit_status"],
            notes["calls"],
            notes["refusals"],
            notes.get("output", ""),
        )

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def computed_tokens(sequences: Sequence[Sequence[int]]) -> int:
    """Tokens that are computed where what a sequence shares with the beginning of an earlier one is computed once."""
    count = 0
    for place, sequence in enumerate(sequences):
        count += len(sequence) - max((_shared(sequence, earlier) for earlier in sequences[:place]), default=0)
    return count


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the beginning that two sequences share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


async def play(
    name: str, environment: Mapping[str, Any], policy: Path, folder: Path, says: Callable[[str], Calls] | None = None
) -> Outcome:
    """Play one episode of an agent on the task.

    Args:
        environment: keys of the harness beside its tasks and its grader.
        policy: as :func:`write_policy` left it.
        folder: of the node and the task; there is nothing yet.
        says: what the policy says; None takes the agent's of :data:`AGENTS`.

    Raises:
        RuntimeError: the episode was lost; says why.
    """
    script = AGENTS[name].says if says is None else says
    harness = {
        "name": "harness",
        "tasks": {"train": [TASK]},
        "task_files": str(write_task(folder / "tasks")),
        "grade_command": GRADE,
        **environment,
    }
    limits = Limits(max_turns=20, max_tokens_per_turn=4000, max_context=CONTEXT, episode_deadline_s=300.0)
    model = {"path": str(policy / "model"), "dtype": "float32", "max_context": CONTEXT, "lora_rank": 8}
    async with local_node(policy, folder / "node", environment=harness, model=model) as running:
        tokens, answered = running.vllm.tokens, []

        async def sample(body: dict[str, Any]) -> Sampled:
            prompt = tokens.decode(body["token_ids"])
            found = FOLDER.search(prompt)
            calls = script(found.group() if found else ".")
            tool = next((call[0] for call in calls if not isinstance(call, str)), "")
            said: Any = "A short title"
            if f'"{tool}"' in prompt or not tool:  # else it is not a part of the work, such as a title
                said = calls[min(len(answered), len(calls) - 1)]
                answered.append(said)
            if not isinstance(said, str):
                call = json.dumps({"name": said[0], "arguments": said[1]})
                said = f"Next.\n<tool_call>\n{call}\n</tool_call>"
            ids = [*tokens.encode_text(said), tokens.turn_end]
            return Sampled(ids, [-0.1] * len(ids), "stop")

        running.vllm.sample = sample  # type: ignore[method-assign]
        rollouts, end = await running.collect(counter_request(tasks=[TASK], rollouts_per_task=1, limits=limits))
    if not rollouts:
        raise RuntimeError(f"{name}: {end.error}")
    return Outcome.of(name, rollouts)
