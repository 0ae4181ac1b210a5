# The form of openai/grade-school-math, with the field renamed as the refusal says.
import json
import re
from pathlib import Path

from agent_environments.tools import reward

ROWS = Path(__file__).with_name("gsm8k.jsonl")
TASKS = [{"target": task.pop("answer"), **task} for task in map(json.loads, open(ROWS))]


def last_number(text: str) -> str:
    found = re.findall(r"-?[\d,]+", text)
    return found[-1] if found else ""


@reward
def correct(answer: str, target: str) -> float:
    return 1.0 if last_number(answer) == last_number(target) else 0.0
