"""A file whose reward is a judge goes through `loop try` and `loop train`: the words after it say which."""

import asyncio
import threading

import pytest

from contrib_support.chat_endpoint import FakeChatEndpoint
from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.own_task import training
from loop_recipes.paths import loop_package
from loop_recipes.verbs import try_tasks
from loop_recipes.verbs.recipes import train as train_verb
from loop_recipes.verbs.try_tasks import main as try_verb
from model_families import opening
from support.small_runs import write_logs
from support.texts import texts_beside

TABLES = texts_beside(__file__)

pytestmark = pytest.mark.fault("a file whose reward is a judge")
MODEL = str(loop_package("tiny_policy"))
JUDGED = TABLES["judged"]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(training, "choose_machine", lambda model: "cpu")


@pytest.fixture
def judged(tmp_path):
    """The file, and the words that say which judge it has: one in a thread of its own, who likes thanks."""
    (tmp_path / "judged.py").write_text(JUDGED)
    endpoint = FakeChatEndpoint()
    endpoint.reply = lambda body: "1" if "thank" in str(body) else "0"
    loop, begun = asyncio.new_event_loop(), threading.Event()
    ended = asyncio.Event()

    async def serve():
        async with endpoint.served():
            begun.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert begun.wait(60)
    judge = "node.environment.judge"
    yield str(tmp_path / "judged.py"), [f"{judge}.url={endpoint.url}", f"{judge}.model=j", f"{judge}.api_key_env=null"]
    loop.call_soon_threadsafe(ended.set)
    thread.join()
    loop.close()


def test_the_file_is_tried(judged, capsys):
    file, words = judged
    assert try_verb([file, *words, "--tasks", "1"]) == 0
    said = capsys.readouterr().out
    assert "=== task greet0: 0 turns, reward 0\n" in said
    assert "right:    solve(task) earns 1 on average of 4 tasks\n" in said


def test_the_file_is_trained_and_scored_with_its_judge(judged, tmp_path, monkeypatch, capsys):
    file, words = judged
    commands = []
    monkeypatch.setattr(training, "run_step", lambda command, log: commands.append(command))
    monkeypatch.setattr(training, "check_finished", lambda run: None)
    monkeypatch.setattr(training, "show", lambda run: [])
    assert train_verb([file, "--model", MODEL, f"output_dir={tmp_path / 'run'}", *words]) == 0
    assert "right:    solve(task) earns 1 on average of 4 tasks\n" in capsys.readouterr().out
    assert [command[-3:-1] for command in commands] == [["loop_appworld", "--config"], ["eval_appworld", "--config"]]
    written = commands[0][-1]
    trained = read_config(compose(written), LoopConfig).child.environment
    scored = read_config(compose(written, (), "eval_appworld"), EvalConfig).node.environment
    said = dict(word.removeprefix("node.environment.judge.").split("=") for word in words)
    assert trained.options["judge"] == scored.options["judge"] == {**said, "api_key_env": None}


@pytest.mark.parametrize("verb", [train_verb, try_verb], ids=["train", "try"])
def test_without_a_judge_the_line_says_how_to_name_one(judged, verb, capsys):
    assert verb([judged[0], "--model", MODEL]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("after the file as node.environment.judge.url=URL node.environment.judge.model=NAME")


@pytest.mark.parametrize(("words", "message"), TABLES["a_mistake_is_one_line"])
def test_a_mistake_is_one_line(judged, words, message, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert try_verb([judged[0], *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_model_is_tried_in_the_form_that_the_words_say(judged, monkeypatch, tmp_path):
    file, words = judged
    own = ["node.model.observation_role=user"]
    asked = []

    def evaluate(command, log):
        node = read_config(compose(command[-1], (), "eval_appworld"), EvalConfig).node
        asked.append((node.model.observation_role, node.environment.options["judge"]["model"]))
        write_logs(tmp_path / "logs", 1, 300)

    monkeypatch.setattr(try_tasks, "run_step", evaluate)
    monkeypatch.setattr(try_tasks, "find_logs", lambda folder: [])
    opened = []
    monkeypatch.setattr(opening, "open_model_chat", lambda *told: opened.append(told[2:]))
    assert try_verb([file, "--model", MODEL, *own, *words]) == 0
    assert asked == [("user", "j")]
    assert opened == [(None, "user")]
