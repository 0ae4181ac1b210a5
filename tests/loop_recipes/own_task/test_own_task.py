"""`loop train my_tools.py`: what is refused before anything starts, the config that is written, what runs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import loop_recipes
from agent_environments.protocol import create_pool
from loop_formats.run_files import ADAPTER_FILES
from loop_formats.schema import ConfigError
from loop_recipes.config.files import compose, read_file
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.own_task import training
from loop_recipes.own_task.training import OwnTask, check_model, choose_machine, config_of, show, train, write_config
from loop_recipes.paths import loop_package
from loop_recipes.run.fingerprint import model_identity
from loop_recipes.verbs.recipes import train as train_verb
from model_families.weights.published import published_config
from support.families import with_config
from support.families import write_config as written_config
from support.texts import texts_beside
from support.tool_modules import PRODUCTS

TABLES = texts_beside(__file__)

MODEL = loop_package("tiny_policy")
QUEST = Path(__file__).parents[3] / "examples/quest.py"


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(training, "choose_machine", lambda model: "cpu")


@pytest.fixture
def products(tmp_path):
    """A file of functions with twenty tasks."""
    file = tmp_path / "products.py"
    file.write_text(PRODUCTS)
    return file


def changed(file, *changes):
    text = file.read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    file.write_text(text)
    return file


@pytest.mark.parametrize(("before", "after", "message"), TABLES["mistakes_in_the_file"])
def test_a_mistake_in_the_file_is_one_line_before_anything_starts(products, before, after, message, capsys, steps):
    changed(products, (before, after))
    assert train_verb([str(products), "--model", str(MODEL), f"output_dir={products.parent / 'run'}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("loop train: ")
    assert message in line
    assert steps == []


@pytest.fixture
def steps(monkeypatch):
    """The commands that would have run."""
    commands = []
    monkeypatch.setattr(training, "run_step", lambda command, log: commands.append([*command, log]))
    return commands


@pytest.mark.parametrize(("word", "message"), TABLES["a_value_of_another_type_is_one_line_before_anything_starts"])
def test_a_value_of_another_type_is_one_line_before_anything_starts(products, word, message, capsys, steps):
    folder = [] if word.startswith("output_dir") else [f"output_dir={products.parent / 'run'}"]
    assert train_verb([str(products), "--model", str(MODEL), *folder, word]) == 1
    said = capsys.readouterr()
    assert said.err.startswith(f"loop train: {message}")
    assert (said.out, said.err.count("\n"), steps) == ("", 1, [])
    assert [*products.parent.glob("run/*")] == [*products.parent.glob("run/.*")] == []


HERE = TABLES["here"]
FILES = ["M/config.json", "M/model.safetensors", "M/q4.gguf", "models/A/config.json", "models/B/config.json"]
FILES += ["torchtunes/epoch_0/config.json", "adapter/adapter_config.json", "run/config.yaml", "tokens/config.json"]
FILES += ["tokens/model.safetensors", "tokens/tokenizer_config.json", "weights/config.json"]


@pytest.mark.fault("what is given as a model is not one, and the line does not say what it is")
@pytest.mark.parametrize("model", HERE)
def test_what_is_given_in_place_of_a_models_folder_is_told(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in FILES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(MODEL / file.name, file) if file.parent.name in ("tokens", "weights") else file.touch()
    with pytest.raises(ConfigError, match=r"^--model: .*|^give --model FOLDER or ") as error:
        check_model(model)
    assert HERE[model] in str(error.value)
    assert "\n" not in str(error.value)


def test_the_machine_is_what_is_there(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert choose_machine(MODEL, tmp_path) == "cpu"
    in_four_bits = published_config("Qwen2.5-1.5B-Instruct-quantized.w4a16")
    assert choose_machine(written_config(tmp_path / "model", in_four_bits), tmp_path) == "cpu_bf16"
    (tmp_path / "nvidia0").touch()
    assert choose_machine(MODEL, tmp_path) == "gpu"
    large = with_config({"path": tmp_path / "Qwen2.5-1.5B-Instruct"})["path"]
    assert choose_machine(Path(large), tmp_path) == "qwen2_5_1_5b_one_gpu"


@pytest.mark.parametrize(("machine", "move", "other"), [("cpu", 16, 128), ("gpu", 16, 128), ("tiny_cpu", 128, 128)])
def test_a_turn_is_as_long_as_a_move_a_call_or_an_answer(products, tmp_path, machine, move, other):
    questions = tmp_path / "questions.py"
    questions.write_text(products.read_text().replace("@tool(terminal=True)", ""))
    for file, tokens in ((QUEST, move), (products, other), (questions, other)):
        words = [f"machine={machine}", f"output_dir={tmp_path / file.stem}"]
        written, trained, _ = write_config(config_of(OwnTask.read(file), MODEL, words))
        assert trained.collection.limits.max_tokens_per_turn == tokens
        assert read_config(compose(str(written), (), "eval_appworld"), EvalConfig).limits.max_tokens_per_turn == tokens


@pytest.mark.parametrize("machine", ["cpu", "gpu", "qwen2_5_1_5b_one_gpu"])
def test_the_config_that_is_written_trains_and_scores(products, tmp_path, machine, monkeypatch):
    monkeypatch.setattr(training, "choose_machine", lambda model: machine)
    task = OwnTask.read(products)
    words = [f"output_dir={tmp_path / 'run'}", "seed=3", "algorithm=grpo", "collection.limits.max_turns=12"]
    file, trained, plays = write_config(config_of(task, MODEL, words))
    assert file == tmp_path / "run/train.yaml"
    assert trained == read_config(compose(str(file)), LoopConfig)
    assert (trained.seed, trained.loss["kl_coefficient"], trained.resume_from_checkpoint) == (3, 0.04, True)
    assert trained.base_model == trained.child.model.path == str(MODEL)
    assert trained.child.environment.options == {"module": str(products), "held_out": 4}
    assert trained.collection.split == "train"
    scoring = read_config(compose(str(file), (), "eval_appworld"), EvalConfig)
    assert (scoring.split, scoring.run) == ("held_out", str(tmp_path / "run"))
    assert scoring.limits.max_turns == trained.collection.limits.max_turns == 12
    assert scoring.limits.max_context == trained.collection.limits.max_context
    assert [policy.adapter for policy in scoring.policies] == [None, str(tmp_path / "run")]
    assert plays == 2 * sum(sampling.runs for sampling in scoring.samplings), "each task before and after"


@pytest.mark.fault("ids that end in a number")
@pytest.mark.parametrize(("change", "held_out", "batch", "said"), TABLES["splits_and_iterations"])
def test_the_split_holds_out_groups_and_an_iteration_is_never_one_task(
    products, change, held_out, batch, said, tmp_path
):
    changed(products, ('f"product{n}"', change))
    task = OwnTask.read(products)
    config = config_of(task, MODEL, [f"output_dir={tmp_path / 'run'}"])
    assert config["node"]["environment"]["held_out"] == held_out
    assert config["collection"]["tasks_per_iteration"] == batch
    assert said in training._head(task, config, [])[0]
    pool = create_pool("tools", {"module": str(products), "held_out": held_out}, lambda text: [])
    assert (pool.tasks("train"), pool.tasks("held_out")) == (task.trained, task.scored)


@pytest.mark.fault("ids that end in a number")
def test_tasks_that_are_all_one_group_are_refused(products):
    changed(products, ('f"product{n}"', 'n, "group": "all"'))
    with pytest.raises(ConfigError, match="all 20 TASKS are of one group by their field 'group'; to train and"):
        config_of(OwnTask.read(products), MODEL, [])


def test_a_file_with_splits_is_scored_on_its_last(products, tmp_path):
    changed(products, ("TASKS = [", "ALL = ["))
    products.write_text(products.read_text() + 'TASKS = {"dev": ALL[:2], "train": ALL[2:4], "test": ALL[4:]}\n')
    config = config_of(OwnTask.read(products), MODEL, [])
    assert config["node"]["environment"] == {"name": "tools", "module": str(products)}
    assert (config["eval"]["split"], config["collection"]["tasks_per_iteration"]) == ("test", 2)
    changed(products, ('"train": ', '"training": '))
    with pytest.raises(ConfigError, match="TASKS: no split 'train'; there are dev, training, test"):
        OwnTask.read(products)


@pytest.mark.fault("a split without tasks")
@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_split_is_named(products, split):
    changed(products, ("TASKS = [", "ALL = ["))
    products.write_text(products.read_text() + f'TASKS = {{**dict.fromkeys(["train", "test"], ALL), "{split}": []}}\n')
    with pytest.raises(ConfigError, match=f"products.py: TASKS: split '{split}' is empty: give it tasks"):
        OwnTask.read(products)


def test_the_same_command_goes_on_and_another_is_refused(products, tmp_path):
    def write(*words):
        return write_config(config_of(OwnTask.read(products), MODEL, [f"output_dir={tmp_path / 'run'}", *words]))

    write("seed=1")
    write("seed=2")
    (tmp_path / "run/metrics.jsonl").touch()
    write("seed=2", "max_iterations=50")
    with pytest.raises(ConfigError, match=r"run holds a run with another seed; give the same, or another output_dir"):
        write("seed=3", "max_iterations=50")
    assert read_file(tmp_path / "run/train.yaml")["max_iterations"] == 50


def test_a_word_that_no_file_can_hold_is_refused(products):
    with pytest.raises(ConfigError, match="~key cannot stand in a file"):
        config_of(OwnTask.read(products), MODEL, ["~stop.max_approx_kl"])


def test_it_trains_then_scores_and_a_trained_run_is_only_scored(products, tmp_path, steps, monkeypatch, capsys):
    monkeypatch.setattr(training, "check_finished", lambda run: None)
    run = tmp_path / "run"
    words = (f"output_dir={run}", "max_iterations=2")
    assert train(products, MODEL, *words) == run
    assert [command[2:] for command in steps] == [
        ["run", recipe, "--config", str(run / "train.yaml"), None] for recipe in ("loop_appworld", "eval_appworld")
    ]
    assert "20 tasks, of which 4 are held out" in (said := capsys.readouterr().out)
    assert "a turn:   calls of answer; a turn without one is a mistake\n" in said
    assert "right:    the field target as the answer earns 1 on average of 20 tasks\n" in said
    assert "nothing:  doing nothing earns 0 on average of 20 tasks\n" in said
    (run / "checkpoints/iteration_0002").mkdir(parents=True)
    fingerprint = {"dataset": "products", **OwnTask.read(products).description.identity, "tools": "of a server"}
    (run / "checkpoints/iteration_0002/state.json").write_text(
        json.dumps({"fingerprint": {"environment": fingerprint}})
    )
    steps.clear()
    train(products, MODEL, *words)
    assert [command[3] for command in steps] == ["eval_appworld"]
    assert "\ndone:     the training is complete (2/2 iterations)\n" in capsys.readouterr().out
    steps.clear()
    for change, what in ((("== target", "> target"), "code"), (("times 37", "times 38"), "code, tasks")):
        changed(products, change)
        with pytest.raises(ConfigError, match=f"fingerprint has changed since its checkpoint: {what}; bring"):
            train(products, MODEL, *words)
    assert steps == []
    train(products, MODEL, *words, "accept_changes=True")
    assert [command[3] for command in steps] == ["eval_appworld"]


def test_three_lines_of_python_need_no_torch():
    assert loop_recipes.train is train
    code = "import sys; from loop_recipes import train; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        loop_recipes.nosuch  # noqa: B018


def test_at_the_end_it_is_said_where_everything_is(tmp_path):
    adapter = tmp_path / "policies/policy-v0002"
    adapter.mkdir(parents=True)
    for name in ADAPTER_FILES:
        (adapter / name).touch()
    figures = {"reward": 0.5, "success": 0.5, "turns": 3.0}

    def write_metrics(*steps):
        head = [{"iteration": number, "dataset": "products", "steps": each} for number, each in enumerate(steps, 1)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line | figures) + "\n" for line in head))

    write_metrics(0, 0)
    why = "no step was made in 2 iterations, because no rollout was kept; for that the rewards of a task have to differ"
    assert show(tmp_path)[-1] == f"warning:  nothing was learned: {why} (loop doctor {tmp_path})"
    write_metrics(0, 1)
    assert show(tmp_path) == [
        f"adapter:  {adapter}",
        f"table:    {tmp_path / 'evaluation/report.md'}",
        f"curve:    {tmp_path / 'learning_curve.png'}",
        f"rollouts: loop view {tmp_path}",
        f"to serve: loop export {tmp_path}",
    ]


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
@pytest.mark.parametrize("moved", ["file", "model", "run"])
def test_a_run_goes_on_in_another_place(products, tmp_path, steps, monkeypatch, moved):
    monkeypatch.setattr(training, "check_finished", lambda run: None)
    run, model = tmp_path / "run", shutil.copytree(MODEL, tmp_path / "model")
    train(products, model, f"output_dir={run}", "max_iterations=2")
    last = run / "checkpoints/iteration_0001"
    last.mkdir(parents=True)
    (run / "metrics.jsonl").touch()
    fingerprint = {"environment": OwnTask.read(products).description.identity, "model": model_identity(model, None)}
    (last / "state.json").write_text(json.dumps({"fingerprint": fingerprint}))
    (tmp_path / "new").mkdir()
    if moved == "file":
        products = products.rename(tmp_path / "new/products.py")
    elif moved == "model":
        model = model.rename(tmp_path / "new/model")
    else:
        run = run.rename(tmp_path / "new/run")
    steps.clear()
    train(products, model, f"output_dir={run}", "max_iterations=2")
    assert [command[3] for command in steps] == ["loop_appworld", "eval_appworld"]
    before = (run / "train.yaml").read_text()
    if moved != "run":
        edited, place = (model / "config.json", "base model") if moved == "model" else (products, "code")
        text = edited.read_text()
        edited.write_text(text.replace("{", '{"of": 1, ', 1) if moved == "model" else f"{text}\n")
        with pytest.raises(ConfigError, match=f"has changed since its checkpoint: {place}; bring it back"):
            train(products, model, f"output_dir={run}", "max_iterations=2")
        assert (run / "train.yaml").read_text() == before
