"""The command ``loop``: a verb for each operation on configs, nodes and runs.

Only the module of the verb asked for is imported: the help, and a mistake in a command line, need no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec

from loop_plumbing.names import nearest
from loop_plumbing.plug_ins import load, plug_ins
from loop_plumbing.sanitize import show_all_text
from loop_plumbing.start import prepare_process
from loop_recipes.exit_status import interrupted
from loop_recipes.paths import TYPED

VERBS = {
    "init": ("NAME", "write a task of your own: a file to change", "loop_recipes.verbs.init:main"),
    "try": ("FILE.py", "check such a file without training", "loop_recipes.verbs.try_tasks:main"),
    "train": ("CONFIG|FILE.py", "train an agent", "loop_recipes.verbs.recipes:train"),
    "sft": ("CONFIG", "train on chats or stored rollouts", "loop_recipes.verbs.recipes:sft"),
    "eval": ("CONFIG", "score policies on held-out tasks", "loop_recipes.verbs.recipes:evaluate"),
    "check": ("CONFIG", "compute whether a config fits your machines", "loop_recipes.verbs.check:main"),
    "node": ("CONFIG", "run a rollout node; or status RUN, cancel RUN ID", "loop_recipes.verbs.node:main"),
    "view": ("RUN...", "look at rollouts in a browser", "loop_recipes.verbs.view:main"),
    "plot": ("RUN...", "draw learning curves", "loop_recipes.plots.curves:main"),
    "export": ("RUN", "write a policy to serve, merge or share", "loop_recipes.verbs.export:main"),
    "doctor": ("RUN", "name the faults of a run, by its metrics", "loop_recipes.verbs.doctor:main"),
    "compare": ("A B", "compare two evaluations, task by task", "loop_recipes.verbs.compare:main"),
}
"""Verb -> its main argument, a summary, and the function that is called with the words after the verb. Installed
packages add theirs: an entry point of the group ``torchtune_loop.verbs`` is such a dict. A verb may be two words."""

CLIENT_VERBS = ("init", "try", "view", "doctor")
"""Verbs that need none of the extra ``train``."""
OTHER_WORDS = {"run": "train", "resume": "train"}
"""Words for verbs in other programs -> our verb; no name of ours resembles them."""
NOTES = """\
CONFIG is a YAML file, or a name from `tune ls`. Change it by key=value, or
remove a key by ~key. `loop VERB --help` lists a verb's options."""


def main(arguments: Sequence[str] | None = None) -> int | None:
    """Call the verb's function; returns the exit status, None for 0."""
    prepare_process()
    show_all_text()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) > 1 and words[0] in ("-h", "--help"):
        words = [*words[1:], words[0]]
    if words == ["--version"]:
        print(f"torchtune-loop {version('torchtune-loop')}")
        return 0
    verbs = VERBS if words and words[0] in VERBS else all_verbs()
    verb = next((name for name in (" ".join(words[:2]), words[0] if words else "") if name in verbs), None)
    if verb is None:
        of_two = [name for name in verbs if words and name.startswith(f"{words[0]} ")]
        if words[1 if of_two else 0 :] in ([], ["-h"], ["--help"]):
            print(help_text())
            return 0
        named = " ".join(words[: 2 if of_two else 1])
        cure = nearest(OTHER_WORDS.get(named, named), [*verbs, "--help", "--version"], f"there are: {', '.join(verbs)}")
        sys.exit(f"loop: no verb {named!r}; {cure}")
    if verb not in CLIENT_VERBS and find_spec("torch") is None:
        sys.exit(f"loop {verb}: torch is not installed: pip install 'torchtune-loop[train]'")
    first = TYPED not in os.environ
    os.environ.setdefault(TYPED, f"loop {verb}")
    try:
        status = load(verbs[verb][2])(words[len(verb.split()) :])
        sys.stdout.flush()  # here, and not at the interpreter's end, a closed pipe is not a failure
        return status
    except KeyboardInterrupt:
        return interrupted(f"loop {verb}")
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    finally:
        if first:
            del os.environ[TYPED]


def all_verbs() -> Mapping[str, tuple[str, str, str]]:
    """Return the project's verbs and those of installed packages. A package's verb never replaces one of ours."""
    added: dict[str, tuple[str, str, str]] = {}
    for name, target in sorted(plug_ins("verbs").items()):
        try:
            added |= load(target)
        except (Exception, SystemExit) as error:
            print(f"loop: the verbs of {name} are left out, {target} cannot be imported: {error}", file=sys.stderr)
    return {**VERBS, **{verb: what for verb, what in added.items() if verb not in VERBS}}


def help_text() -> str:
    """Return a list of the verbs, for one screen."""
    lines = [f"  {f'{verb} {argument}':<27}{summary}" for verb, (argument, summary, _) in all_verbs().items()]
    return "\n".join(["usage: loop VERB ...   or: loop --version", "", *lines, "", NOTES])


if __name__ == "__main__":
    sys.exit(main())
