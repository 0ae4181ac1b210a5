"""`loop try`: what doing nothing earns, and a person at the keyboard."""

import io
import signal
from pathlib import Path

import pytest

from loop_recipes.config.files import compose
from loop_recipes.config.loop_config import read_config
from loop_recipes.evaluation.config import EvalConfig
from loop_recipes.own_task import training
from loop_recipes.paths import loop_package
from loop_recipes.verbs import try_tasks
from loop_recipes.verbs.init import EXAMPLE
from loop_recipes.verbs.try_tasks import as_action, main
from support.small_runs import write_logs
from support.texts import texts_beside


def test_what_doing_nothing_sees_and_earns(capsys):
    assert main([str(EXAMPLE), "--tasks", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("Guess a number") == 2
    assert said.startswith("=== task from1number1: 0 turns, reward 0\n"), "above what it is of"
    assert "\n\n=== task from1number2: 0 turns, reward 0\n" in said
    assert said.endswith(
        "right:    solve(task) earns 1 on average of 20 of 200 tasks\n"
        "nothing:  doing nothing earns 0 on average of 20 of 200 tasks\n"
    )


def test_a_person_plays(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("It's 10!\n1\n2\n"))
    assert main([str(EXAMPLE), "--by-hand", "--tasks", "3"]) == 0
    said = capsys.readouterr().out
    assert said.index("Lower.\n") < (first := said.index("=== task from1number1: 2 turns, reward 1\n"))
    assert first < said.index("=== task from1number2: 1 turns, reward 1\n")
    assert "=== task from1number3: 0 turns, reward 0\n" in said, "at the end of the input"
    assert said.count("Guess a number") == 3, "each task's question once"
    assert said.endswith("mean reward 0.667 of 3 tasks\n")


@pytest.mark.fault("Ctrl-C at the keyboard waited for Enter, printed a traceback and promised that it can be resumed")
def test_a_person_leaves_at_once(capsys, monkeypatch):
    def interrupted(prompt):
        signal.raise_signal(signal.SIGINT)
        return "a line typed afterwards"

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("builtins.input", interrupted)
    assert main([str(EXAMPLE), "--by-hand"]) == 1
    assert capsys.readouterr().err == "loop try: left at the keyboard\n"
    assert signal.getsignal(signal.SIGINT) is before


TEXTS = texts_beside(__file__)
SHOP = TEXTS["shop"]


def test_a_person_is_told_how_a_call_is_typed_and_what_was_taken_for_the_answer(tmp_path, capsys, monkeypatch):
    (tmp_path / "shop.py").write_text(SHOP)
    monkeypatch.setattr("sys.stdin", io.StringIO("price apple\nprice item=apple\n3\n\n"))
    assert main([str(tmp_path / "shop.py"), "--by-hand", "--tasks", "3"]) == 0
    said = capsys.readouterr().out
    told = "a call is typed as price item=... [currency=...]; any other line is text, and an empty one ends the episode"
    assert said.count(told) == 1
    assert said.index(told) < said.index("\n> ")
    ended = "that was not a call of a tool, so it was the answer: {}\n=== task task{}: {} turns, reward {}\n"
    assert ended.format("price apple", 1, 1, 0) in said
    assert ended.format("3", 2, 2, 1) in said
    assert said.count("it was the answer") == 2


def test_a_reply_that_raises_ends_the_episode_and_is_named(tmp_path, capsys, monkeypatch):
    file = tmp_path / "game.py"
    file.write_text(EXAMPLE.read_text().replace("if match else None", ""))
    monkeypatch.setattr("sys.stdin", io.StringIO("hm\n"))
    assert main([str(file), "--by-hand", "--tasks", "1"]) == 0
    line = "1 turns, reward 0, ended as step raised TypeError: 'NoneType' object is not subscriptable"
    assert f"=== task from1number1: {line} ({file}:" in capsys.readouterr().out


def test_a_model_plays_as_an_evaluation_that_is_thrown_away(monkeypatch, tmp_path, capsys):
    folders = []

    def evaluate(command, log):
        config = read_config(compose(command[-1], (), "eval_appworld"), EvalConfig)
        assert [(policy.name, policy.adapter) for policy in config.policies] == [("model", None)]
        assert (config.tasks, config.limits.max_turns) == (["from1number1", "from1number2"], 6)
        folders.append(Path(command[-1]).parent)
        write_logs(folders[0] / "evaluation/node/collections", 1, 300)

    monkeypatch.setattr(try_tasks, "run_step", evaluate)
    monkeypatch.setattr(training, "choose_machine", lambda model: "cpu")
    assert main([str(EXAMPLE), "--model", str(loop_package("tiny_policy")), "--tasks", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("=== task ") == 12
    assert "sampled, calls: none, reward " in said
    assert not folders[0].exists()


COUNTING = TEXTS["counting"]
EXPERT_POOL = TEXTS["expert_pool"]


def counting(tmp_path, name="counter"):
    file = tmp_path / "counting.yaml"
    file.write_text(COUNTING.format(folder=tmp_path, name=name))
    return str(file)


def test_a_split_that_the_environment_has_not_is_named_by_its_key(tmp_path, capsys):
    assert main([counting(tmp_path), "collection.split=paper_train"]) == 1
    assert capsys.readouterr().err.startswith("loop try: collection.split: ")


def test_the_environment_of_a_config_is_played(tmp_path, capsys, monkeypatch):
    assert main([counting(tmp_path), "--tasks", "2"]) == 0
    said = capsys.readouterr().out
    assert said.count("Task: Bring the counter from 0 to ") == 2
    assert "=== task reach3_1: 0 turns, reward 0" in said
    assert "right:    right answers could not be tried (reach3_1: the environment has no expert)\n" in said
    (tmp_path / "counting_pool.py").write_text(EXPERT_POOL)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([counting(tmp_path, "counting_pool:CountingPool"), "--tasks", "1"]) == 0
    assert "right:    the environment's expert earns 1 on average of 12 tasks\n" in capsys.readouterr().out


def test_a_person_plays_the_environment_of_a_config(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("hm\n\n"))
    assert main([counting(tmp_path), "--by-hand", "--tasks", "1", "collection.tasks=[reach5_2]"]) == 0
    assert "=== task reach5_2: 1 turns, reward 0" in capsys.readouterr().out


def test_a_config_s_mistakes_are_one_line(tmp_path, capsys):
    for words, said in (
        (["nosuch_config"], "no config 'loop_appworld/nosuch_config'"),
        ([counting(tmp_path), "--model", "models/any"], "a config's environment is played by a model with `loop eval`"),
        (["tiny_cpu", "world=agent"], "harness is played by a program of its own"),
        (
            [counting(tmp_path), "node.environment={name: textcraft, python: /none/python}"],
            "no interpreter of the worlds",
        ),
    ):
        assert main(words) == 1
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


def test_a_mistake_is_one_line(tmp_path, capsys):
    assert main([str(tmp_path / "nosuch.py")]) == 1
    assert capsys.readouterr().err == f"loop try: {tmp_path / 'nosuch.py'} is not a file\n"
    (tmp_path / "my_game.py").touch()
    assert main([str(tmp_path / "my_gaem.py")]) == 1
    assert capsys.readouterr().err.endswith(f"is not a file; did you mean '{tmp_path / 'my_game.py'}'?\n")
    with pytest.raises(SystemExit):
        main([str(EXAMPLE), "--tasks", "0"])


@pytest.mark.parametrize(("line", "action"), TEXTS["a_line_is_a_call_or_a_text"])
def test_a_line_is_a_call_or_a_text(line, action):
    assert as_action(line, 'tools: {"name": "guess"}') == action
