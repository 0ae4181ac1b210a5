# The form of openai/human-eval: task_id "HumanEval/<n>", prompt, entry_point, canonical_solution, test.
import subprocess
import sys

from agent_environments.tools import reward

PROBLEMS = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": f"def add_{n}(x: int) -> int:\n    \"\"\"Return x plus {n}.\"\"\"\n",
        "entry_point": f"add_{n}",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n    assert candidate(-5) == {n - 5}\n",
    }
    for n in range(12)
]
TASKS = [{"id": row["task_id"], "question": row["prompt"], **row} for row in PROBLEMS]


@reward
def passes(answer: str, prompt: str, test: str, entry_point: str) -> bool:
    program = f"{prompt}{answer}\n{test}\ncheck({entry_point})\n" if answer else "raise SystemExit(1)"
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=20)
    return done.returncode == 0


def solve(task):
    return task["canonical_solution"].strip("\n")
