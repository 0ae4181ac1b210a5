"""Compose all configs that ship under two checkouts, and compare the YAMLs key by key.

    python benchmarks/configs.py BASE [--json results.json]

BASE is a commit, or the folder of another checkout. Composed are, for each recipe and with contrib's among them:

- ``machine``: each machine by itself.
- ``world``, ``preset``, ``algorithm``: each over a machine with the tiny policy and over one of the paper's.
- ``words``: changes by a command line, and mistakes in it.
- ``files``: files of a user's own, over a machine and in place of one.

A command that is refused is compared by its error. A row of the table per recipe and kind says how many were composed,
how many are new, equal and differ, and names the first difference. Keys that were renamed since BASE stand in
:data:`RENAMED`, which is applied to what BASE composes; those of :data:`CHANGED` are left out. Ends with 0 where all
that BASE composes is equal, else with 1.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
from checkouts import HERE, base_checkout, check_imported, hide_installed_checkout, run_checkout

RENAMED: Mapping[str, str] = {}
"""An old key -> its new one, each with its whole path (``update.epochs``); keys below a section go with it."""
CHANGED: Mapping[str, str] = {
    "update.micro_batch_tokens": "rows of 1,024 tokens on CPUs: as fast, at a fifth of the memory",
    "update.loss_divisor": "the default is written out",
    "update.episode_return": "new: success or reward as the return",
    "rollouts.most_per_task": "left: no config set it",
}
"""Keys that began or left since, or have another default, each with its reason; they are not compared."""

OVER = ("tiny_cpu", "qwen2_5_7b")
"""The machines that worlds, presets and algorithms are composed over: with the tiny policy, and without."""
KINDS = ("world", "preset", "algorithm")
WORDS: Mapping[str, Sequence[Sequence[str]]] = {
    "loop_appworld": (
        ("seed=3", "update={epochs: 2}", "collection.tasks=[a_1,b_2]", "run_name=None", "output_dir=a #b"),
        ("loss.eps=0.3", "advantage=a.b.Shuffled", "node.environment.name=counter", "~stop.max_approx_kl"),
        ("world=babyai", "preset=on_policy", "algorithm=[rloo,horizon_curriculum]"),
        ("algorithm=[ppo_critic,distillation]", "~credit.critic"),
        ("machine=tiny_gpu", "algorithm=null"),
        ("algorithm=dpo",),
        ("preset=choose_on_dev",),
        ("algorithm=gpro",),
        ("algo=grpo",),
        ("babyai",),
        ("model=a/b",),
        ("seed=[",),
        ("~loss",),
        ("~stop.kl",),
    ),
    "sft_appworld": (("world=babyai", "algorithm=dpo", "rollouts.logs=[a]"), ("algorithm=ppo_critic",)),
    "eval_appworld": (
        ("world=babyai", "preset=choose_on_dev", "algorithm=grpo"),
        ("preset=on_policy", "run=a", "split=dev"),
        (".",),
    ),
    "warm_start_appworld": (("seed=1", "~demonstrations.cache"), ("world=babyai",)),
}
"""A recipe -> command lines over the first machine that it has."""
FILES = {
    "over.yaml": "machine: tiny_cpu\nworld: w.yaml\nalgorithm: [grpo, a.yaml]\n"
    "update: {epochs: 14}\ninitial_adapter: x\n"
    "eval: {split: dev}\nsft: {export_every: 3}\nwarm_start: {seed: 2}\ntrain: {run_name: mine}\n",
    "w.yaml": "node: {environment: {name: counter}}\n"
    "when: {tiny_policy: {seed: 5, eval: {seed: 6}}, large: {seed: 7}}\n",
    "a.yaml": "update: {epochs: 3}\ntrain: {seed: 8}\nsft: {seed: 9}\n",
    "above.yaml": "machine: below.yaml\nmax_iterations: 7\noutput_dir: runs/mine\neval: {limits: {max_turns: 3}}\n",
    "below.yaml": "machine: qwen2_5_7b\ntraits: [large]\nworld: w.yaml\nseed: 1\neval: {seed: 4}\n",
    "folder.yaml": "machine: tiny_cpu\nworld: babyai\npreset: paper\noutput_dir: runs/mine\neval: {run: runs/other}\n",
    "misspelt.yaml": "machine: tiny_cpu\nsede: 1\n",
    "circle.yaml": "machine: circle.yaml\n",
    "broken.yaml": "a: [1\nb: 2\n",
    "listed.yaml": "- 1\n",
    "of_none.yaml": "machine: nosuch\n",
}
"""A user's own files; of those with a machine, each is composed for each recipe."""

Outcome = dict[str, Any] | str
"""Result of a command: dotted key -> value in the order of its YAML, or the error that refused it."""


def commands(recipe: str, known: Mapping[str, Mapping[str, Path]]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield kind, config and words of each command line of ``recipe``; ``known`` are the files that ship."""
    machines = list(known["machine"])
    over = [name for name in OVER if name in machines] or machines[:1]
    for name in machines:
        yield "machine", name, []
    for kind in KINDS:
        for name in known[kind]:
            yield from ((kind, machine, [f"{kind}={name}"]) for machine in over)
    for words in WORDS[recipe]:
        yield "words", over[0], list(words)
    for name in FILES:
        yield "files", name, []


def compose_all(checkout: Path, result: Path) -> None:
    """Write what ``checkout`` composes to ``result``; called in a process whose path begins with it."""
    hide_installed_checkout()
    from loop_formats.schema import ConfigError
    from loop_recipes.config.files import compose
    from loop_recipes.paths import RECIPES, config_files
    from rollout_server.config import as_written

    def outcome(name: str, words: Sequence[str], recipe: str) -> Outcome:
        try:
            return dict(leaves(as_written(compose(name, words, recipe))))
        except ConfigError as error:
            return str(error).replace(str(checkout), "CHECKOUT")

    rows = [
        [recipe, kind, " ".join([name, *words]), outcome(name, words, recipe)]
        for recipe in RECIPES
        for kind, name, words in commands(recipe, config_files(recipe))
    ]
    check_imported(checkout)
    result.write_text(json.dumps(rows))


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each leaf of a config, in its order; an empty section is a leaf."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def renamed(outcome: Outcome) -> Outcome:
    """Return what BASE composed with the keys of today, also where another value refers to one by ``${key}``."""
    if isinstance(outcome, str):
        return outcome

    def new(key: str) -> str:
        old = next((old for old in RENAMED if key == old or key.startswith(f"{old}.")), "")
        return RENAMED[old] + key.removeprefix(old) if old else key

    def value(item: Any) -> Any:
        if isinstance(item, list):
            return [value(each) for each in item]
        if isinstance(item, dict):
            return {key: value(each) for key, each in item.items()}
        return re.sub(r"(?<=[{:])[\w.]+", lambda key: new(key[0]), item) if "${" in str(item) else item

    return {new(key): value(item) for key, item in outcome.items()}


def difference(before: Outcome, now: Outcome) -> str | None:
    """Return the first difference, in one line; None without one."""
    if isinstance(before, str) or isinstance(now, str):
        if _without_names(before) == _without_names(now):
            return None
        texts = [each if isinstance(each, str) else "composed" for each in (before, now)]
        return f"{texts[0]!r} -> {texts[1]!r}"
    before, now = ({key: each[key] for key in each if key not in CHANGED} for each in (before, now))
    for key in {**now, **before}:
        if key not in before or key not in now:
            return f"{key} is only in {'BASE' if key in before else 'this checkout'}"
        if before[key] != now[key]:
            return f"{key}: {before[key]!r} -> {now[key]!r}"
    moved = {*RENAMED.values()}
    orders = ([key for key in each if not any(key.startswith(new) for new in moved)] for each in (before, now))
    return next((f"the order of keys, at {key}" for was, key in zip(*orders, strict=True) if was != key), None)


def _without_names(outcome: Outcome) -> Outcome:
    """Return a refusal without the names that it lists, among which new ones are; all else as it is."""
    return re.sub("there are: .*", "", outcome) if isinstance(outcome, str) else outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", metavar="BASE", help="a commit, or the folder of another checkout")
    parser.add_argument("--json", type=Path, help="write the rows there, with all differences")
    for name in ("checkout", "result"):  # of a checkout's own process
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.checkout:
        compose_all(args.checkout, args.result)
        return 0
    with tempfile.TemporaryDirectory(prefix="configs-") as temporary:
        folder = Path(temporary)
        own = folder / "own"
        own.mkdir()
        for name, text in FILES.items():
            (own / name).write_text(text)

        def composed(name: str, checkout: Path) -> str | None:
            words = ["--result", str(folder / f"{name}.json")]
            return run_checkout(checkout, __file__, words, own, folder / f"{name}.log")

        with base_checkout(args.base, folder / "checkout") as base, ThreadPoolExecutor() as both:
            ended = {name: both.submit(composed, name, at) for name, at in (("base", base), ("now", HERE))}
            if failed := {name: run.result() for name, run in ended.items() if run.result() is not None}:
                print("\n".join(f"{name}: {why}" for name, why in failed.items()))
                return 1
        before, now = (json.loads((folder / f"{name}.json").read_text()) for name in ("base", "now"))
    rows = compared(before, now)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return show(rows)


def compared(before: Sequence[Sequence[Any]], now: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return a row per recipe and kind: {"recipe", "kind", "composed", "refused", "new", "equal", "differ"}, the last
    of them a difference for each command that has one."""
    was = {(recipe, kind, command): outcome for recipe, kind, command, outcome in before}
    rows: dict[tuple[str, str], dict[str, Any]] = defaultdict(
        lambda: {"composed": 0, "refused": 0, "new": 0, "equal": 0, "differ": {}}
    )
    for recipe, kind, command, outcome in now:
        row = rows[recipe, kind]
        row["refused" if isinstance(outcome, str) else "composed"] += 1
        base = was.pop((recipe, kind, command), None)
        differs = None if base is None else difference(renamed(base), outcome)
        if differs is None:
            row["new" if base is None else "equal"] += 1
        else:
            row["differ"][command] = differs
    for recipe, kind, command in was:
        rows[recipe, kind]["differ"][command] = "is only in BASE"
    return [{"recipe": recipe, "kind": kind, **row} for (recipe, kind), row in rows.items()]


def show(rows: Sequence[Mapping[str, Any]]) -> int:
    """Print a line per row; returns the exit status."""
    print(
        f"{'recipe':<20}{'kind':<10}{'composed':>9}{'refused':>8}{'new':>5}{'equal':>6}{'differ':>7}  first difference"
    )
    for row in rows:
        first = next((f"{command}: {differs}" for command, differs in row["differ"].items()), "")
        counts = f"{row['composed']:>9}{row['refused']:>8}{row['new']:>5}{row['equal']:>6}{len(row['differ']):>7}"
        print(f"{row['recipe']:<20}{row['kind']:<10}{counts}  {first}".rstrip())
    return int(any(row["differ"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
