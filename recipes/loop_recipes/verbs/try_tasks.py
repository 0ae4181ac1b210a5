"""Plays a few tasks of a file, or of a config's environment, before anything is trained. No model is needed.

loop try my_tools.py                shows the agent's messages, and the rewards of doing nothing and of right answers
loop try my_tools.py --by-hand      you are the agent: `guess number=10` calls a tool, any other line is text,
                                    and an empty line ends the episode
loop try my_tools.py --model FOLDER node.model.thinking=off
                                    a model plays; key=value words mean the same as for `loop train`
loop try my_run.yaml                the same for the environment of a config; its expert, if there is one, plays the
                                    right answers
"""

from __future__ import annotations

import json
import shlex
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from omegaconf import OmegaConf

from agent_environments.protocol import EnvironmentFault, EnvironmentPool, Message, UnknownTask, create_pool, is_harness
from agent_environments.tool_calls import CALL_OPENS, split_tools_section
from loop_formats.rollout import Rollout
from loop_formats.run_files import find_logs, read_rollouts
from loop_formats.schema import ConfigError, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.sanitize import sanitize
from loop_plumbing.separate_task import result_of
from loop_recipes.config.arguments import verb_parser
from loop_recipes.config.files import compose
from loop_recipes.exit_status import exit_status
from loop_recipes.own_task.oracle import ORACLE_TASKS, ask_oracle
from loop_recipes.own_task.play import Played, nothing, play_tasks, words_as_tokens
from loop_recipes.own_task.training import TRAINED, OwnTask, check_model, config_of, write_config
from loop_recipes.steps import StepFailed, run_step, tune


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = verb_parser("try", __doc__)
    parser.add_argument(
        "file", metavar="FILE", help="FILE.py with a @reward and TASKS, and @tool or @reply functions; or a config"
    )
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--by-hand", action="store_true", help="play at the keyboard")
    who.add_argument("--model", metavar="MODEL", help="a model that plays: its folder, or its name on the hub")
    parser.add_argument("--tasks", type=int, default=3, metavar="N", help="show the first N tasks (3)")
    parser.add_argument(
        "words", nargs="*", metavar="key=value", help="a key of the config, such as node.environment.judge.url=URL"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.tasks < 1:
        parser.error(f"--tasks is {options.tasks}; it must be at least 1")

    def work() -> str:
        if not options.file.endswith(".py"):
            require(options.model is None, "a config's environment is played by a model with `loop eval`")
            return _play_config(options.file, options.words, options.tasks, options.by_hand)
        task = OwnTask.read(options.file, options.words)
        if options.model is not None:
            return played_by(task, check_model(options.model, options.words), options.tasks, options.words)
        if not options.by_hand:
            system = ""  # most tasks share it; it is printed where it differs
            for played in task.earned_by_nothing(options.tasks):
                new = [each for each in played.messages if each.role != "system" or each.content != system]
                system = next((each.content for each in played.messages if each.role == "system"), system)
                print(result(played), *map(message_text, new), sep="\n\n", end="\n\n")
            return "\n".join([*task.ask_oracle(max(ORACLE_TASKS, options.tasks)).lines, *_groups(task)])
        return _by_hand(task.pool(), lambda: task.splits[TRAINED][: options.tasks])

    return exit_status(parser.prog, work, (ConfigError, StepFailed, EnvironmentFault, ValueError, OSError))


def _by_hand(pool: EnvironmentPool, tasks: Callable[[], Sequence[str]]) -> str:
    agent = Keyboard()
    episodes = result_of(play_tasks(pool, tasks, agent, agent.ended))
    rewards = [one.grade.reward for one in episodes]
    return f"mean reward {sum(rewards) / len(rewards):.3f} of {len(rewards)} tasks"


def _play_config(name: str, words: Sequence[str], count: int, by_hand: bool) -> str:
    from loop_recipes.config.rollout_node import described_node  # its schemas, which a file of functions does not need

    config = compose(name, words)
    environment = described_node(config).environment
    require(
        not is_harness(environment.name),
        f"{environment.name} is played by a program of its own: see a whole episode with `loop eval {name}`",
    )

    def pool() -> EnvironmentPool:
        return create_pool(environment.name, environment.options, words_as_tokens)

    playing = pool()

    def tasks() -> Sequence[str]:
        chosen = OmegaConf.select(config, "collection.tasks")
        with raised_as(ConfigError, "collection.split: ", UnknownTask):
            return list(chosen) if chosen else playing.tasks(str(config.collection.split))

    if by_hand:
        return _by_hand(playing, lambda: tasks()[:count])
    for played in result_of(play_tasks(playing, lambda: tasks()[:count], nothing)):
        print(result(played), *map(message_text, played.messages), sep="\n\n", end="\n\n")
    playing = pool()
    solves = getattr(getattr(playing, "module", None), "solve", None) is not None
    return "\n".join(ask_oracle(playing, solves, tasks, max(ORACLE_TASKS, count)).lines)


def _groups(task: OwnTask) -> list[str]:
    count = len(task.splits[TRAINED])
    if task.groups == count:
        return []
    if task.groups == 1:
        return [f"groups:   all {count} tasks are one group by their field 'group', so none can be held out"]
    return [f"groups:   {count} tasks in {task.groups} groups by their field 'group'"]


def played_by(task: OwnTask, model: Path, count: int, words: Sequence[str] = ()) -> str:
    """Let the model play the first ``count`` tasks, as a temporary evaluation; returns its episodes as text."""
    from loop_recipes.rollouts.broken import hopeless_lines

    with TemporaryDirectory(prefix="loop-try-") as folder:
        config = config_of(task, model, [*words, f"output_dir={folder}"])
        config["eval"] |= {
            "policies": [{"name": "model", "adapter": None}],
            "tasks": task.splits[TRAINED][:count],
            "samplings": [{"temperature": 1.0, "runs": 1}],
        }
        file, *_ = write_config(config)
        run_step(tune("run", "eval_appworld", "--config", str(file)), None)
        rollouts = [rollout for log in find_logs(Path(folder)) for rollout in read_rollouts(log)]
    lines = [line for rollout in rollouts for line in _rollout_lines(rollout)]
    return "\n\n".join([*lines, *hopeless_lines(rollouts, task.description)])


def _rollout_lines(rollout: Rollout) -> list[str]:
    tools = ", ".join(f"{use['tool']} x{use['calls']}" for use in rollout.tools) or "none"
    return [
        f"=== task {rollout.task_id}: {len(rollout.turns)} turns, {rollout.sampled_tokens} tokens of "
        f"{len(rollout.token_ids)} sampled, calls: {tools}, reward {rollout.reward:g}",
        *(message_text(Message(message["role"], message["content"])) for message in rollout.messages),  # type: ignore[arg-type]
    ]


class Keyboard:
    """The agent played by a person: prints new messages, and reads a line. Explains once how to type calls."""

    def __init__(self) -> None:
        self._printed = 0
        self._typed_calls: list[str] = []

    def __call__(self, messages: list[Message]) -> str | None:
        self._show(messages)
        calls = typed_calls(messages[0].content)
        if calls and calls != self._typed_calls:
            self._typed_calls = calls
            print(f"\na call is typed as {', '.join(calls)}; any other line is text, and an empty one ends the episode")
        handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # the event loop's acts after the line
        try:
            line = input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            raise ConfigError("left at the keyboard") from None
        finally:
            signal.signal(signal.SIGINT, handler)
        self._printed += 1  # the typed line is on the screen
        return as_action(line, messages[0].content) if line else None

    def _show(self, messages: Sequence[Message]) -> None:
        print(*map(message_text, messages[self._printed :]), sep="\n\n", flush=True)
        self._printed = len(messages)

    def ended(self, played: Played) -> None:
        """Show how an episode ended; the next one begins anew."""
        self._show(played.messages)
        self._printed = 0
        last = played.messages[-1]
        if typed_calls(played.messages[0].content) and last.role == "assistant" and CALL_OPENS not in last.content:
            print(f"that was not a call of a tool, so it was the answer: {sanitize(last.content)}")
        print(f"{result(played)}\n", flush=True)


def typed_calls(system: str) -> list[str]:
    """Return how to type a call of each tool that ``system`` offers; arguments in brackets are optional."""
    calls = []
    for schema in split_tools_section(system)[1]:
        function = schema["function"]
        required, names = (function["parameters"].get(key, ()) for key in ("required", "properties"))
        arguments = [f"{name}=..." if name in required else f"[{name}=...]" for name in names]
        calls.append(" ".join([function["name"], *arguments]))
    return calls


def as_action(line: str, system: str) -> str:
    """Return the agent's action for a typed line: a call of a tool that ``system`` offers, or the text itself."""
    try:
        name, *rest = shlex.split(line)
    except ValueError:  # an apostrophe
        return line
    if f'"name": {json.dumps(name)}' not in system or not all("=" in word for word in rest):
        return line
    arguments = {key: _value(value) for key, _, value in (word.partition("=") for word in rest)}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def message_text(message: Message) -> str:
    """Format a message for the terminal, with its number of words."""
    count = len(message.content.split())
    return f"--- {message.role} ({count} word{'' if count == 1 else 's'})\n{sanitize(message.content)}"


def result(played: Played) -> str:
    """Say in one line how an episode ended."""
    grade = played.grade
    why = f", ungradable: {grade.ungradable}" if grade.ungradable else ""
    if grade.broke is not None and grade.ungradable is None:
        why = f", ended as {grade.broke.line}"
    return f"=== task {played.task_id}: {played.turns} turns, reward {grade.reward:g}{why}"
