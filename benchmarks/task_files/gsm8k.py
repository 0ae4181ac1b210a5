# The form of openai/grade-school-math: rows of "question" and "answer", which ends in "#### <number>".
import json
import re
from pathlib import Path

from agent_environments.tools import reward

TASKS = [json.loads(line) for line in Path(__file__).with_name("gsm8k.jsonl").read_text().splitlines()]


@reward
def correct(trajectory: list, answer: str) -> float:
    said = re.findall(r"-?[\d,]+", trajectory[-1]["content"])
    return float(bool(said) and said[-1] == answer.split("#### ")[-1])
