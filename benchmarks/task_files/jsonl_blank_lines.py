from pathlib import Path

from agent_environments.tools import reward

TASKS = {
    "train": str(Path(__file__).parent / "capitals.jsonl"),
    "test": [{"question": "Capital of Peru?", "capital": "Lima"}],
}


@reward
def right(answer: str, capital: str) -> bool:
    return capital.lower() in answer.lower()
