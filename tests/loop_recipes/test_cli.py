"""The command `loop`: each verb leads to its own command, and help and mistakes need nothing heavy."""

import argparse
import contextlib
import importlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

import pytest

from loop_recipes import cli
from loop_recipes.cli import all_verbs, main
from loop_recipes.config.files import check_overrides, compose
from loop_recipes.config.loop_config import LoopConfig, read_config
from loop_recipes.config.sft_config import SftConfig
from loop_recipes.evaluation.config import EvalConfig
from support.configs import files_read_once  # noqa: F401 - a fixture for all tests here
from support.texts import texts_beside
from support.waiting import COMMAND_S

VERBS = all_verbs()
CHECKOUT = Path(__file__).parents[2]
NODE = "{python} -m rollout_server"
HEAVY = ("torch", "torchtune", "torchao", "transformers", "vllm")
SCREEN = (24, 80)
HELP = (("--help",), *((*verb.split(), "--help") for verb in VERBS))
TEXTS = texts_beside(__file__)
MISTAKES = {words: said.replace("{CHECKOUT}", str(CHECKOUT)) for words, said in TEXTS["mistakes"].items()}


@cache
def answers(*commands: tuple[str, ...]) -> dict[tuple[str, ...], tuple[int, list[str], str]]:
    """For each command line, run one after the other in one fresh process: the exit code, the heavy modules that are
    imported by then, and what was printed."""
    command = [sys.executable, "-c", TEXTS["answers"], json.dumps(commands), json.dumps(HEAVY)]
    with tempfile.TemporaryDirectory() as home:  # without this checkout's runs
        environment, cwd = {**os.environ, "LOOP_HOME": home}, CHECKOUT / "recipes/loop_recipes"
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr
    return {words: tuple(answer) for words, answer in zip(commands, json.loads(done.stdout), strict=True)}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["method"], ["method", "--help"]])
def test_the_help_names_every_verb_on_one_screen(words, capsys):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= SCREEN[0]
    assert max(map(len, lines)) <= SCREEN[1]
    for verb, (argument, summary, _) in VERBS.items():
        assert any(re.fullmatch(rf" *{verb} {re.escape(argument)} +{re.escape(summary)}", line) for line in lines)


@pytest.mark.parametrize("words", [["-h", "train"], ["--help", "train"], ["train", "-h"]])
def test_help_is_of_the_verb_on_either_side(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert (ended.value.code, capsys.readouterr().out.startswith("usage: loop train ")) == (0, True)


def test_the_help_needs_no_more_than_python_itself(monkeypatch):
    started = time.process_time()
    main(["--help"])
    assert time.process_time() - started < 1
    assert answers(*HELP)["--help",][1] == []


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_imports_nothing_heavy(verb):
    code, heavy, said = answers(*HELP)[*verb.split(), "--help"]
    assert (code, heavy) == (0, [])
    assert said.startswith(f"usage: loop {verb} ")


@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_calls_its_own_function_with_the_words_after_it(verb, monkeypatch):
    module, function = VERBS[verb][2].split(":")
    monkeypatch.setattr(importlib.import_module(module), function, lambda words: words)
    assert main([*verb.split(), "a", "b=1", "--", "method"]) == ["a", "b=1", "--", "method"]


@pytest.mark.fault("Ctrl-C in the first seconds")
def test_ctrl_c_is_one_line_whatever_is_imported(monkeypatch, capsys):
    def pressed(target):
        raise KeyboardInterrupt

    monkeypatch.setattr("loop_recipes.cli.load", pressed)
    status = None
    with contextlib.suppress(KeyboardInterrupt):  # else a failure here would end all tests
        status = main(["plot", "runs/demo"])
    assert status == 130
    assert capsys.readouterr().err == "loop plot: stopped\n"


@pytest.mark.fault("a terminal that knows only ASCII")
def test_what_a_terminal_cannot_show_ends_no_program(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr("loop_recipes.plots.curves.main", lambda words: print("62.4 ± 17.9 ━ 最良"))
    assert main(["plot", "x"]) is None
    out.flush()
    assert out.buffer.getvalue() == b"62.4 ? 17.9 ? ??\n"


@pytest.mark.parametrize("words", [["trian", "tiny_cpu"], ["method", "tree"], ["zzz"], ["-v"]])
def test_an_unknown_verb_is_one_line_that_names_those_there_are(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert str(ended.value).startswith(f"loop: no verb '{' '.join(words[:2] if words[0] == 'method' else words[:1])}'")
    near = {"trian": "train", "method": "method trees"}
    cure = f"did you mean '{near[words[0]]}'?" if words[0] in near else f"there are: {', '.join(VERBS)}"
    assert str(ended.value).endswith(f"; {cure}")


@pytest.mark.fault("loop VERB --help: examples at two indentations")
@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_is_as_wide_as_the_terminal(verb):
    said = answers(*HELP)[*verb.split(), "--help"][2]
    assert [line for line in said.splitlines() if len(line) > 80] == []
    examples = [line for line in said.splitlines() if line.lstrip().startswith("loop ") and "usage:" not in line]
    assert [line for line in examples if not line.startswith("  loop ")] == []


def test_an_option_that_is_a_key_is_told_how_keys_are_written(capsys):
    for words, cure in TEXTS["cures"].items():
        verb, option = words.split()
        with pytest.raises(SystemExit):
            main([verb, "tiny_cpu", option, "1"])
        assert capsys.readouterr().err.endswith(f"; {cure}\n")
    with pytest.raises(SystemExit):
        main(["train"])
    assert capsys.readouterr().err.endswith("the following arguments are required: CONFIG\n")


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_in_a_config_is_said_before_anything_heavy_is_imported(command):
    code, heavy, said = answers(*(tuple(each.split()) for each in MISTAKES))[*command.split(),]
    assert (code, heavy) == (1, [])
    message = MISTAKES[command]
    assert said.startswith(message if message.startswith("loop: ") else f"loop {command.split()[0]}: {message}")


def shown_commands() -> list[list[str]]:
    """Words of the commands that pages, heads of configs and docstrings show, without ``loop`` and the environment."""
    pages = ("docs/**/*.md", "*.md", "*/README.md", "recipes/configs/*/*.yaml", "contrib/*/*/configs/*/*.yaml")
    sources = [page for place in pages for page in CHECKOUT.glob(place)]
    modules = {entry.partition(":")[0] for _, _, entry in VERBS.values()}
    sources += [Path(importlib.import_module(module).__file__ or "") for module in modules]
    found = []
    names = "|".join(VERBS)
    for source in sorted(sources):  # every worker collects them in the same order
        text = re.sub(r" *\\+\n#? *", " ", source.read_text())
        lines = re.findall(r"^(?:#? {3,4}|# |\$ )?(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?loop ([a-z].*)$", text, flags=re.M)
        if source.suffix == ".md":  # in a sentence, with more behind the verb than its name or an option's
            inside = re.findall(r"`(?:\.venv/bin/)?loop ([a-z][^`]*)`", text)
            lines += [
                line
                for line in inside
                if re.fullmatch(f"({names}) (?!status$|cancel$)[^-.].*", line) and "..." not in line
            ]
        for line in lines:
            words = shlex.split(re.sub(r" {3,}\S.*", "", line), comments=True)
            if words and words[0] in {verb.split()[0] for verb in VERBS}:
                found.append(words)
    return found


class Parsed(BaseException):
    """The command line was understood; what it asks for is not done."""


@pytest.fixture
def only_parse(monkeypatch):
    def stop(self, words=None, namespace=None, parse=argparse.ArgumentParser.parse_known_args):
        raise Parsed(parse_all(self, words, parse))

    def parse_all(self, words, parse):
        options, rest = parse(self, words)
        assert not rest, rest
        return options

    def stop_intermixed(self, words=None, parse=argparse.ArgumentParser.parse_known_intermixed_args):
        raise Parsed(parse_all(self, words, parse))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", stop_intermixed)


RECIPES = {"sft": "sft_appworld", "eval": "eval_appworld"}
SECTIONS = {"loop_appworld": LoopConfig, "sft_appworld": SftConfig, "eval_appworld": EvalConfig}
SHOWN = shown_commands()


def test_commands_are_shown():
    assert len(SHOWN) > 40
    assert {verb for verb in VERBS if any(shown[: len(verb.split())] == verb.split() for shown in SHOWN)} == set(VERBS)


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_command_that_is_shown_is_understood(words, only_parse, monkeypatch):
    monkeypatch.setattr("model_families.weights.hub.is_hub_name", lambda name: False)  # nothing is fetched
    with pytest.raises(Parsed) as parsed:
        cli.main(words)
    (options,) = parsed.value.args
    recipe = RECIPES.get(words[0], "loop_appworld")
    for name, of in ((getattr(options, "config", None), recipe), (getattr(options, "training", None), "sft_appworld")):
        if name is not None and name.endswith(".py"):
            check_overrides(options.overrides)
        elif name is not None and not name.endswith(".yaml") and not name.isupper():
            words = [word for word in getattr(options, "overrides", []) if "..." not in word]
            config = compose(name, words, of)
            if words:  # that of an endpoint is none without
                read_config(config, SECTIONS[of])


def test_the_version_is_said(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torchtune-loop {importlib.metadata.version('torchtune-loop')}\n"


@pytest.mark.slow
def test_a_reader_that_has_enough_is_no_failure():
    reads, writes = os.pipe()
    os.close(reads)
    loop = Path(sys.executable).with_name("loop")
    done = subprocess.run([loop, "check", "--keys", "collection."], stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.fault("a program of ours is not found when it is started otherwise")
@pytest.mark.parametrize("words", ["{bin}/loop", "{link}", "{python} {bin}/loop", "{python} -m loop_recipes", NODE])
def test_it_starts_wherever_it_is_called_from(tmp_path, words):
    (tmp_path / "link").symlink_to(Path(sys.executable).with_name("loop"))
    command = words.format(bin=Path(sys.executable).parent, link=tmp_path / "link", python=sys.executable).split()
    elsewhere = {"cwd": tmp_path, "env": {"PATH": "/usr/bin:/bin"}, "capture_output": True, "text": True}
    done = subprocess.run([*command, "--help"], timeout=COMMAND_S, **elsewhere)
    program = "rollout-server" if words == NODE else "loop"
    assert done.stdout.startswith(f"usage: {program} "), done.stderr
