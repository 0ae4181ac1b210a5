"""`loop train`, `loop sft`, `loop eval`: which `tune run` they become."""

import os
import signal
from pathlib import Path

import pytest

from loop_recipes.cli import main
from loop_recipes.config.files import compose
from loop_recipes.paths import TYPED, recipes_folder
from loop_recipes.verbs import tune_run
from loop_recipes.verbs.recipes import evaluate, sft, train

TINY_POLICY = recipes_folder() / "loop_recipes/tiny_policy"
MODEL = f"model.path={TINY_POLICY}"


@pytest.fixture(autouse=True)
def without_this_checkouts_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("LOOP_HOME", str(tmp_path))


@pytest.fixture
def command(monkeypatch):
    """The command that this process would have become, without its folder. It hears Ctrl-C again afterwards, which a
    verb leaves blocked for what it becomes."""
    became = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.extend([Path(words[1]).name, *words[2:]]))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    yield became
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@pytest.mark.parametrize(
    ("verb", "words", "tune"),
    [
        (train, ["tiny_cpu"], "tune run loop_appworld --config loop_appworld/tiny_cpu"),
        (train, ["loop_appworld/tiny_gpu", "seed=1"], "tune run loop_appworld --config loop_appworld/tiny_gpu seed=1"),
        (
            train,
            ["qwen2_5_32b", "--nproc-per-node", "4", MODEL, "~stop.max_approx_kl"],
            "tune run --standalone --local_addr 127.0.0.1 --shutdown_timeout 86400 --nproc_per_node 4 loop_appworld "
            f"--config loop_appworld/qwen2_5_32b {MODEL} ~stop.max_approx_kl",
        ),
        (sft, ["tiny_cpu", "data=README.md"], "tune run sft_appworld --config sft_appworld/tiny_cpu data=README.md"),
        (
            evaluate,
            ["tiny_cpu", 'policies=[{"name":"a"}]'],
            'tune run eval_appworld --config eval_appworld/tiny_cpu policies=[{"name":"a"}]',
        ),
    ],
)
def test_a_verb_becomes_tune_run(command, verb, words, tune):
    verb(words)
    assert command == tune.split()


@pytest.mark.fault("one command begins its lines with two names")
def test_what_a_verb_becomes_is_told_the_verb(monkeypatch):
    told = []
    monkeypatch.setattr(os, "execv", lambda program, words: told.append(os.environ.get(TYPED)))
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, set())
    main(["train", "tiny_cpu"])
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    assert (told, os.environ.get(TYPED)) == (["loop train"], None)


def test_a_config_is_composed_once_and_its_model_has_one_commit(command, monkeypatch, tmp_path):
    composed = []
    monkeypatch.setattr(tune_run, "compose", lambda *given: composed.append(compose(*given)) or composed[-1])
    (tmp_path / "abc").symlink_to(TINY_POLICY)
    monkeypatch.setattr("model_families.weights.hub.model_folder", lambda name: tmp_path / "abc")
    train(["tiny_cpu", "model.path=me/small"])
    assert command[-2:] == ["model.path=me/small", "model.path=me/small@abc"]
    assert [config.model.path for config in composed] == ["me/small@abc"]


def test_a_file_of_the_users_own(command, tmp_path):
    (tmp_path / "mine.yaml").write_text("machine: tiny_cpu\nseed: 1\n")
    train([str(tmp_path / "mine.yaml"), "seed=2"])
    assert command == ["tune", "run", "loop_appworld", "--config", str(tmp_path / "mine.yaml"), "seed=2"]


@pytest.mark.parametrize(
    ("verb", "words", "message"),
    [
        (train, ["nosuch"], "loop train: no config 'loop_appworld/nosuch'; there are: "),
        (train, ["tiny_cpu", "lr=1"], "loop train: unknown key 'lr'; did you mean 'optimizer.lr'?"),
        (sft, ["tiny_cpu", "seed"], "loop sft: 'seed' is not understood; after the config come key=value"),
        (evaluate, ["tiny_cpu", "~nosuch"], "loop eval: ~nosuch: there is no such key"),
        (evaluate, ["tiny_cpu", "splitt=dev"], "loop eval: unknown key 'splitt'; did you mean 'split'?"),
        (evaluate, ["tiny_cpu", "run=runs/dmeo"], "loop eval: policies[1].adapter: there is no folder runs/dmeo; "),
        (evaluate, ["tiny_cpu", "run=runs/d*"], "loop eval: policies[1].adapter: no adapter folder matches runs/d*"),
    ],
)
@pytest.mark.fault("loop eval of a misspelt run: told after the libraries were imported")
def test_a_mistake_is_one_line_before_anything_is_started(command, verb, words, message):
    with pytest.raises(SystemExit) as ended:
        verb(words)
    assert str(ended.value).startswith(message)
    assert command == []


def test_an_evaluation_is_one_process(capsys):
    with pytest.raises(SystemExit):
        evaluate(["tiny_cpu", "--nproc-per-node", "2"])
    assert "unrecognized arguments: --nproc-per-node 2" in capsys.readouterr().err
