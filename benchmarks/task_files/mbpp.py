# The form of google-research's MBPP: task_id is a number, text, code, test_list.
from agent_environments.tools import reward

ROWS = [
    {
        "task_id": 11 + n,
        "text": f"Write a function times{n} that multiplies its argument by {n}.",
        "code": f"def times{n}(x):\n    return x * {n}",
        "test_list": [f"assert times{n}(3) == {3 * n}", f"assert times{n}(0) == 0"],
    }
    for n in range(2, 12)
]
TASKS = [dict(row, id=row["task_id"], question=row["text"]) for row in ROWS]


@reward
def tests_passed(answer, test_list):
    space = {}
    passed = 0
    try:
        exec(answer, space)
    except Exception:
        return 0
    for test in test_list:
        try:
            exec(test, space)
            passed += 1
        except Exception:
            pass
    return passed / len(test_list)


def solve(task):
    return [task["code"]]
