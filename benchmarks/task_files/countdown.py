# The form of Jiayi-Pan/Countdown-Tasks-3to4: target and nums.
import random
import re

from agent_environments.tools import reward

draw = random.Random(7)
TASKS = []
for n in range(30):
    a, b, c = draw.sample(range(2, 60), 3)
    TASKS.append(
        {
            "id": n,
            "target": a + b - c,
            "nums": [a, b, c],
            "question": f"Using {[a, b, c]}, make {a + b - c}. Answer with <answer> equation </answer>.",
        }
    )


@reward
def score(answer, target, nums):
    found = re.search(r"<answer>(.*?)</answer>", answer, re.S)
    if not found or not re.fullmatch(r"[\d+\-*/() ]+", found[1]):
        return 0.0
    if sorted(map(int, re.findall(r"\d+", found[1]))) != sorted(nums):
        return 0.1
    try:
        return 1.0 if abs(eval(found[1]) - target) < 1e-5 else 0.1
    except Exception:
        return 0.1


def solve(task):
    a, b, c = task["nums"]
    yield f"<answer>{a} + {b} - {c}</answer>"
