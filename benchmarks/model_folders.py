"""Folders of models as other tools write them: taken and computed right, or refused in one line before anything starts.

    python benchmarks/model_folders.py [--json results.json] [--only WORD]

The folders are made on the spot, small and random (``tests/support/model_folders.py``). A folder that is taken is
opened as `loop train --model` opens it, loaded as the learner loads it, and its log-probs are compared with those of
transformers from the same folder, in float32, on ids of its vocabulary. A last line shows that a difference would be
seen. One that cannot be trained must be refused by the same call. ``seconds`` is the call alone; Python's imports come
before it. Ends 1 if a folder that should be taken is not, or its log-probs are further than 1e-5 apart, or one that
should be refused is taken, refused in more lines than one or after more than ten seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The root and recipes/ too, because folders of tests/ are called like packages and hide those that are installed.
sys.path.extend(str(Path(__file__).resolve().parents[1] / folder) for folder in ("", "recipes", "tests"))

import torch
from transformers import AutoModelForCausalLM

from loop_formats.schema import ConfigError
from loop_recipes.engine.model import meta_model, new_adapter
from loop_recipes.engine.sharding import place_model
from loop_recipes.own_task.training import check_model
from model_families.base_model import BaseModel
from model_families.decoder.weights import load_weights
from support.families import section
from support.model_folders import CASES, Case, reconfigured, reference_folder

BOUND = 1e-5
"""Nats between our log-probs and transformers', at most."""
DEADLINE_S = 10.0
TOKENS = 60


@dataclass(frozen=True)
class Outcome:
    """The result of a folder: ``refusal`` is the line of a refusal, ``apart`` the largest difference in nats."""

    case: Case
    seconds: float
    refusal: str | None = None
    apart: float | None = None

    @property
    def right(self) -> bool:
        """Return whether it is what it should be."""
        if self.case.refused is None:
            return self.apart is not None and self.apart <= BOUND
        return self.refusal is not None and "\n" not in self.refusal and self.seconds < DEADLINE_S

    @property
    def words(self) -> str:
        """The outcome for the table."""
        return f"taken, {self.apart:.1e} apart" if self.refusal is None else self.refusal


def run(case: Case, scratch: Path) -> Outcome:
    """Make the folder, open it, and compute with it if it is taken."""
    folder = scratch / "model"
    folder.mkdir()
    case.make(folder)
    began = time.perf_counter()
    try:
        check_model(folder)
    except ConfigError as error:
        return Outcome(case, time.perf_counter() - began, str(error).replace(str(folder), "FOLDER"))
    seconds = time.perf_counter() - began
    return Outcome(case, seconds, apart=difference(folder, reference_folder(folder, scratch / "reference")))


def difference(folder: Path, reference: Path) -> float:
    """Return the largest difference in nats between the learner's log-probs and transformers' of the same tokens."""
    base = BaseModel.read(folder)
    rows = min(base.vocabulary, 300)
    tokens = torch.randint(0, rows, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    model = meta_model(section(folder), torch.float32)
    weights = {name: tensor.float() for name, tensor in load_weights(folder, base).items()}
    ours = place_model(model, weights, new_adapter(model, 0), torch.device("cpu"), torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    with torch.no_grad():
        logprobs, expected = (out.float().log_softmax(-1) for out in (ours(tokens), theirs(tokens).logits))
    return (logprobs - expected).abs().max().item()


def control(scratch: Path) -> float:
    """Return the same as :func:`difference` where the two differ in the base of their rotary positions alone."""
    folder = scratch / "model"
    folder.mkdir()
    CASES[0].make(folder)
    other = reference_folder(folder, scratch / "other")
    reconfigured(other, rope_theta=1e4)
    return difference(folder, other)


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """Return the lines of the table."""
    yield f"{'':>2} {'folder':<46} {'seconds':>7}  outcome"
    for one in outcomes:
        yield f"{'' if one.right else '!!':>2} {one.case.name:<46} {one.seconds:7.2f}  {one.words[:150]}"
    taken = [one.apart for one in outcomes if one.apart is not None]
    lines = [one.seconds for one in outcomes if one.refusal is not None]
    wrong = sum(not one.right for one in outcomes)
    yield (
        f"{len(outcomes)} folders: {len(taken)} taken, at most {max(taken, default=0):.1e} nats apart; {len(lines)} "
        f"refused, after {max(lines, default=0):.2f} s at most; {wrong} not as they should be"
    )


def rows(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """Return the results as rows."""
    made = []
    for one in outcomes:
        case = f"ours {one.case.name}"
        made.append({"case": case, "metric": "seconds", "value": round(one.seconds, 3), "unit": "s"})
        if one.apart is not None:
            made.append({"case": case, "metric": "logprobs_apart", "value": one.apart, "unit": "nats"})
        made.append({"case": case, "metric": "right", "value": int(one.right), "unit": "bool"})
    return made


def main() -> int:
    """Run what the words ask for; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the rows there, too")
    parser.add_argument("--only", default="", metavar="WORD", help="folders whose name holds it")
    options = parser.parse_args()
    outcomes = []
    for case in CASES:
        if options.only in case.name:
            with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
                outcomes.append(run(case, Path(scratch).resolve()))
    print("\n".join(table(outcomes)))
    with tempfile.TemporaryDirectory() as scratch, open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
        gap = control(Path(scratch).resolve())
    print(f"control: another base of the rotary positions is {gap:.2f} nats apart")
    if options.json is not None:
        options.json.write_text(json.dumps(rows(outcomes), indent=1) + "\n", encoding="utf-8")
    return int(gap <= BOUND or not all(one.right for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
