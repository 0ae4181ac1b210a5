"""Trains on a file of functions: checks it, writes the run's config, trains, scores before and after, draws.

The config is ``<output_dir>/train.yaml``, a file as a user would write it: ``loop train``, ``loop eval`` and `tune run`
also take it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from agent_environments.description import Description
from agent_environments.protocol import EnvironmentFault, EnvironmentPool, UnknownTask, create_pool
from loop_formats.places import METRICS_FILE, loop_home
from loop_formats.run_files import in_order, newest_adapter, whole_file
from loop_formats.run_folder import nothing_learned
from loop_formats.schema import ConfigError, from_mapping, made_folder, require
from loop_plumbing.breakage import raised_as
from loop_plumbing.names import did_you_mean, similar_names
from loop_plumbing.separate_task import result_of
from loop_recipes.config.files import check_overrides, compose, with_words
from loop_recipes.own_task.oracle import ORACLE_TASKS, Oracle, ask_oracle
from loop_recipes.own_task.play import Played, nothing, play_tasks, words_as_tokens
from loop_recipes.paths import KINDS
from loop_recipes.steps import check_finished, module, run_step, tune
from loop_recipes.terminal import say
from model_families.base_model import BaseModel, model_digest
from model_families.weights.hub import is_hub_name, model_folder, pinned
from rollout_server.config import ModelConfig, read_file

if TYPE_CHECKING:
    from loop_recipes.config.loop_config import LoopConfig

ENVIRONMENT = "tools"
TRAINED = "train"
HELD_OUT_SHARE = 0.2
MOST_HELD_OUT = 100
"""Maximum of held-out groups of tasks: more would take too long on a small machine."""
TASKS_PER_ITERATION = 8
LAPTOP, HALF_LAPTOP, SMALL_GPU, ONE_GPU = "cpu", "cpu_bf16", "gpu", "qwen2_5_1_5b_one_gpu"
SMALL_MODEL = 10**9  # parameters, below which a model is one for gpu
SMALL_EPISODES = {"max_turns": 10, "max_tokens_per_turn": 500, "max_context": 4096}
"""Limits in place of those for long episodes in ``qwen2_5_1_5b_one_gpu``."""
SAME_LIMITS = {key: f"${{collection.limits.{key}}}" for key in ("max_turns", "max_context")}
"""Limits of the scored episodes: those of the training, whatever the machine's config has."""
CALLS_AND_ANSWERS = {"max_tokens_per_turn": 128}
"""Limit in place of 16 tokens, enough for a move in plain text: the shortest call takes 30."""
NO_MODEL = (
    "give --model FOLDER or --model OWNER/NAME of the Hugging Face hub: `make smollm2` makes "
    "models/SmolLM2-135M-Instruct, and docs/add_a_model.md says which others there are"
)


@dataclass(frozen=True)
class OwnTask:
    """A file of functions: its parts, ``splits`` by name, and the number of groups of tasks in ``train``.

    ``environment`` holds the command line's options of the environment, such as a judge.
    ``trained`` and ``scored`` are the tasks to train on and those to score on; () where the file cannot be divided.
    """

    file: Path
    module: Any
    splits: dict[str, list[str]]
    groups: int
    description: Description
    environment: Mapping[str, Any]
    trained: Sequence[str] = ()
    scored: Sequence[str] = ()

    @classmethod
    def read(cls, file: str | Path, words: Sequence[str] = ()) -> OwnTask:
        """Import the file and look at its parts.

        Args:
            words: ``key=value`` of the config, among which ``node.environment`` may name a judge, or other options.

        Raises:
            ConfigError: the file does not exist, or a part of it is wrong; one line.
        """
        file = Path(file)
        near = similar_names(file.name, [path.name for path in file.parent.glob("*.py")])
        hint = f"; {did_you_mean([str(file.with_name(name)) for name in near])}" if near else ""
        require(file.is_file(), f"{file} is not a file{hint}")
        environment = _node_section(words, "environment")
        require(not {"name", "module"} & environment.keys(), f"node.environment: its module is {file}; leave that away")
        with raised_as(ConfigError), raised_as(ConfigError, f"{file}: TASKS: ", UnknownTask):
            pool = _pool(file.resolve(), environment)
            splits = {name: pool.tasks(name) for name in dict.fromkeys([*pool.splits(), TRAINED])}
        groups = len(set(map(pool.description.group_of, splits[TRAINED])))
        task = cls(file.resolve(), pool.module, splits, groups, pool.description, environment)
        if len(splits) > 1:
            return replace(task, trained=splits[TRAINED], scored=splits[task.scored_split])
        if groups > 1:
            pool.module.tasks.hold_out(task.held_out_groups)
            return replace(task, trained=pool.tasks(TRAINED), scored=pool.tasks(task.scored_split))
        return task

    @property
    def held_out_groups(self) -> int | None:
        """The number of groups of ``train`` to hold out; None if the file has a split to score on."""
        if len(self.splits) > 1:
            return None
        count = len(self.splits[TRAINED])
        all_one = "TASKS has one task" if count == 1 else f"all {count} TASKS are of one group by their field 'group'"
        require(self.groups > 1, f"{self.file}: {all_one}; to train and to score takes two at least")
        return max(1, min(MOST_HELD_OUT, round(HELD_OUT_SHARE * self.groups)))

    @property
    def scored_split(self) -> str:
        """The split to score on: the file's last one other than ``train``."""
        return "held_out" if len(self.splits) == 1 else [name for name in self.splits if name != TRAINED][-1]

    @property
    def options(self) -> dict[str, Any]:
        """The environment's section of a config."""
        held_out = {} if self.held_out_groups is None else {"held_out": self.held_out_groups}
        return {"name": ENVIRONMENT, "module": str(self.file), **held_out, **self.environment}

    def pool(self) -> EnvironmentPool:
        """Make the environment's pool, not yet open."""
        return _pool(self.file, self.environment)

    def earned_by_nothing(self, count: int) -> list[Played]:
        """Play the first ``count`` tasks without doing anything.

        Raises:
            ConfigError: the environment breaks already here, such as by a reward that raises; one line.
        """
        with self._begins():
            episodes = result_of(play_tasks(self.pool(), lambda: self.splits[TRAINED][:count], nothing))
        return _unbroken(episodes)

    def ask_oracle(self, most: int = ORACLE_TASKS) -> Oracle:
        """Play at most ``most`` tasks with the right answers, with nonsense and with nothing.

        Raises:
            ConfigError: the environment breaks with nothing done; one line.
        """
        with self._begins():
            oracle = ask_oracle(self.pool(), self.module.solve is not None, lambda: self.splits[TRAINED], most)
        _unbroken(oracle.nothing)
        return oracle

    def check_reward(self) -> list[str]:
        """Return the oracle's lines before a training.

        Raises:
            ConfigError: the file's own right answers earn nothing, so that nothing could be learned.
        """
        oracle = self.ask_oracle()
        # Alone in its group, the right answer may be worth nothing.
        hopeless = oracle.solves and oracle.right_is_worth_nothing and not self.module.grades_groups
        tried = f"all {len(oracle.right)} tasks that were tried"
        require(
            not hopeless, f"{self.file}: solve(task) earns 0 on {tried}, so nothing could be learned; {oracle.cure}"
        )
        return oracle.lines

    def check_unchanged(self, run: Path, model: Path, accept: bool) -> None:
        """Compare the contents of file and model with a run's newest checkpoint, as a resumed run does.

        Args:
            run: the run's folder; without a checkpoint nothing is compared.
            accept: the config's ``accept_changes``.

        Raises:
            ConfigError: the model, the code or the tasks have changed, and that is not accepted.
        """
        states = in_order(run.glob(CHECKPOINTS))
        if not states:
            return
        from loop_recipes.run.fingerprint import compare  # torch

        state = json.loads(states[-1].read_text(encoding="utf-8"))
        trained_on = state.get("fingerprint", {}).get("model", {})
        compare(state, "model", {**trained_on, "base model": model_digest(model)}, accept)
        before = state.get("fingerprint", {}).get("environment", {})
        own = {key: value for key, value in self.description.identity.items() if key in ("code", "tasks")}
        compare(state, "environment", {**before, **own}, accept)  # other tools, such as MCP's, are not open

    def _begins(self) -> AbstractContextManager[None]:
        return raised_as(ConfigError, f"{self.file}: an episode cannot begin: ", EnvironmentFault, ValueError, OSError)


def _unbroken(episodes: list[Played]) -> list[Played]:
    for played in episodes:
        if (broke := played.grade.broke) is not None:
            raise ConfigError(f"{broke.line}, on task {played.task_id}, with nothing done")
    return episodes


def _pool(file: Path, options: Mapping[str, Any]) -> Any:
    return create_pool(ENVIRONMENT, {**options, "module": str(file), "max_worlds": 1}, words_as_tokens)


def check_model(folder: str | os.PathLike[str] | None, words: Sequence[str] = ()) -> Path:
    """Check a model for training and serving, and return its folder.

    Args:
        folder: the model's folder, or its name on the hub.
        words: ``key=value`` of the config, among which ``node.model.thinking`` may turn thinking on or off.

    Raises:
        ConfigError: the model cannot be trained or served; one line.
    """
    from model_families.opening import open_model_chat, open_weights  # `loop try` without a model needs none of it

    if folder is None:
        raise ConfigError(NO_MODEL)
    with raised_as(ConfigError, "--model: "):
        base = open_weights(path := model_folder(str(folder)))
    chat = from_mapping(ModelConfig, {"path": str(path), **_node_section(words, "model")}, "node.model")
    with raised_as(ConfigError, "--model: "):
        open_model_chat(path, base, chat.thinking, chat.observation_role)
    return path.resolve()


def _node_section(words: Sequence[str], key: str) -> Mapping[str, Any]:
    check_overrides(words)
    node = with_words({}, words).get("node")
    section = node.get(key) if isinstance(node, dict) else None
    return section if isinstance(section, dict) else {}


def choose_machine(model: Path, devices: Path = Path("/dev")) -> str:
    """Return the name of the machine's config, chosen by the model and by whether there is an NVIDIA GPU."""
    if not any(devices.glob("nvidia[0-9]*")):
        return LAPTOP if BaseModel.read(model).four_bits is None else HALF_LAPTOP
    return SMALL_GPU if BaseModel.read(model).parameters < SMALL_MODEL else ONE_GPU


def config_of(task: OwnTask, model: Path, words: Sequence[str]) -> dict[str, Any]:
    """Make the config of a run, as a file would hold it.

    Args:
        words: ``key=value`` that win over the choices made here.

    Raises:
        ConfigError: a word is not ``key=value``.
    """
    check_overrides(words)
    require(
        not any(word.startswith("~") for word in words), "~key cannot stand in a file; give key=null or another value"
    )
    machine = with_words({}, words).get("machine") or choose_machine(model)
    chosen: dict[str, Any] = {
        "output_dir": str(loop_home() / "runs" / task.file.stem),
        "resume_from_checkpoint": True,
        "model": {"path": str(model)},
        "collection": {"split": TRAINED, "tasks_per_iteration": min(TASKS_PER_ITERATION, len(task.trained))},
        "node": {"environment": task.options, "endpoint": False},
        "eval": {"split": task.scored_split, "limits": SAME_LIMITS},
    }
    if machine == ONE_GPU:
        chosen["collection"]["limits"] = SMALL_EPISODES
    elif machine in (LAPTOP, HALF_LAPTOP, SMALL_GPU) and (task.module.tools or not task.module.reply):
        chosen["collection"]["limits"] = CALLS_AND_ANSWERS
    tree = with_words({"machine": machine, **chosen}, words)
    for key in ("model", "collection", "node", "node.environment", "eval"):
        require(OmegaConf.select(OmegaConf.create(tree), key), f"{key} cannot be left out")
    for kind in KINDS:  # a path is relative to the file that holds it
        if isinstance(name := tree.get(kind), str) and Path(name).is_file():
            tree[kind] = str(Path(name).resolve())
    folder = tree["output_dir"]
    require(isinstance(folder, str), f"output_dir must be str, not {folder!r}")
    return {**tree, "output_dir": str(Path(folder).absolute())}


MAY_DIFFER = ("max_iterations", "accept_changes")
"""Keys that may change when a run is resumed."""
CHECKPOINTS = "checkpoints/iteration_*/state.json"
PLACES = ("output_dir=null", "model.path=null", "node.environment.module=null")
"""Keys of the places of run, model and file: a checkpoint identifies these by their content."""


def write_config(config: Mapping[str, Any]) -> tuple[Path, LoopConfig, int]:
    """Write ``<output_dir>/train.yaml``; only :data:`MAY_DIFFER` may differ from the config that the run began with.

    Returns:
        The file, the training's config as read from the file, and how often the evaluation plays each task.

    Raises:
        ConfigError: a key is unknown or its value ill-typed, or the folder holds a run that began otherwise, or cannot
            be made.
    """
    from loop_recipes.config.loop_config import LoopConfig, read_config  # `loop try` and the help need neither
    from loop_recipes.evaluation.config import EvalConfig

    folder = made_folder("output_dir", Path(config["output_dir"]))
    file = folder / "train.yaml"
    if (folder / METRICS_FILE).exists():
        places = PLACES if any(folder.glob(CHECKPOINTS)) else ()
        before, now = (with_words(each, places) for each in (read_file(file) if file.exists() else {}, dict(config)))
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in MAY_DIFFER]
        require(not keys, f"{folder} holds a run with another {', '.join(keys)}; give the same, or another output_dir")
    module = Path(config["node"]["environment"]["module"])
    head = f"# Made by `loop train {module.name}`. `loop train` and `loop eval`\n"
    head += "# take this file too; `loop check` shows all that it leaves to the machine.\n"
    with whole_file(file) as partial:
        partial.write_text(head + OmegaConf.to_yaml(OmegaConf.create(dict(config))), encoding="utf-8")
        training = read_config(compose(str(partial)), LoopConfig)
        scoring = read_config(compose(str(partial), (), "eval_appworld"), EvalConfig)
    return file, training, len(scoring.policies) * sum(sampling.runs for sampling in scoring.samplings)


def train(module: str | os.PathLike[str], model: str | os.PathLike[str] | None, *words: str) -> Path:
    """Train a model on a file of functions, and score it before and after.

    The same call resumes a stopped run.

    Args:
        module: a Python file with ``@reward`` and ``TASKS``, and ``@tool`` or ``@reply`` functions.
        model: the folder of a Hugging Face model, or its name on the hub.
        words: ``key=value`` of the config, such as ``max_iterations=50`` or ``output_dir=runs/mine``.

    Returns:
        The folder of the run.

    Raises:
        ConfigError: anything wrong with the arguments, before anything starts; one line.
        StepFailed: the training or the evaluation did not come to its end.
    """
    task, folder = OwnTask.read(Path(module), words), check_model(model, words)
    config = config_of(task, folder, words)
    if is_hub_name(name := str(model)):  # train.yaml holds the name and the commit
        config["model"] |= {"path": pinned(name)}
    task.check_unchanged(Path(config["output_dir"]), folder, bool(config.get("accept_changes")))
    file, training, plays = write_config(config)
    run, wanted = file.parent, training.max_iterations
    last = run / "checkpoints" / f"iteration_{wanted:04d}"
    notes = [] if (run / METRICS_FILE).exists() else task.check_reward()
    if last.is_dir():
        notes = [f"done:     the training is complete ({wanted}/{wanted} iterations)"]
    trained = wanted * training.collection.tasks_per_iteration * training.collection.rollouts_per_task
    scored = plays * len(config["eval"].get("tasks") or task.scored)
    notes.append(f"rollouts: {trained} to train, then {scored} to score, before and after")
    say(*_head(task, config, notes))
    sys.stdout.flush()
    if not last.is_dir():
        run_step(tune("run", "loop_appworld", "--config", str(file)), None)
        check_finished(run)
    print("now scored on the held-out tasks, before and after training:", flush=True)
    run_step(tune("run", "eval_appworld", "--config", str(file)), None)
    return run


def show(run: Path) -> list[str]:
    """Draw the curves of a finished run. Return lines that say where everything is."""
    nothing = nothing_learned(run)
    run_step(module("loop_recipes.cli", "plot", str(run)), run / "plot.log")
    return [
        f"adapter:  {newest_adapter(run)}",
        f"table:    {run / 'evaluation' / 'report.md'}",
        f"curve:    {run / 'learning_curve.png'}",
        f"rollouts: loop view {shlex.quote(str(run))}",
        f"warning:  {nothing}" if nothing else f"to serve: loop export {shlex.quote(str(run))}",
    ]


def _head(task: OwnTask, config: Mapping[str, Any], notes: Sequence[str]) -> list[str]:
    trained, scored, groups = len(task.trained), len(task.scored), task.held_out_groups
    if groups is None:
        tasks = f"{trained} tasks to train on, {scored} of split {task.scored_split} to score on"
    elif task.groups == trained + scored:
        tasks = f"{trained + scored} tasks, of which {scored} are held out to score on, always the same"
    else:
        tasks = f"{trained + scored} tasks in {task.groups} groups, of which {groups} are held out to score on, always "
        tasks += f"the same: {trained} tasks to train on, {scored} to score on"
    model = config["model"]["path"]
    return [
        f"task:     {task.file.name}, {tasks}",
        f"a turn:   {task.module.moves}",
        f"model:    {model}, {BaseModel.read(model_folder(model)).parameters / 1e6:.0f}M parameters",
        f"machine:  {config['machine']} (machine=NAME takes another, `tune ls` names them)",
        *notes,
        f"config:   {Path(config['output_dir']) / 'train.yaml'}",
    ]
