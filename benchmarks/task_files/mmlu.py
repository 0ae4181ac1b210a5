# The form of cais/mmlu: question, subject, choices, and the answer as an index.
from agent_environments.tools import reward

ROWS = [
    {"question": f"Which number is {n}?", "subject": "numbers", "choices": [str(n + k) for k in (1, 0, 2, 3)], "answer": 1}
    for n in range(40)
]
TASKS = [
    {
        "id": f"{row['subject']}_{n}",
        "question": row["question"] + "".join(f"\n{letter}. {text}" for letter, text in zip("ABCD", row["choices"])),
        "letter": "ABCD"[row["answer"]],
    }
    for n, row in enumerate(ROWS)
]


@reward
def correct(answer: str, letter: str) -> bool:
    return answer.strip().upper()[:1] == letter
