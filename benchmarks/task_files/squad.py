# The form of rajpurkar/squad: id, title, context, question, answers {"text": [...], "answer_start": [...]}.
from agent_environments.tools import reward

ROWS = [
    {
        "id": f"56be{n:04x}",
        "title": "Places",
        "context": f"The town number {n} lies on the river Arno{n}.",
        "question": "On which river does it lie?",
        "answers": {"text": [f"Arno{n}", f"the Arno{n}"], "answer_start": [33, 29]},
    }
    for n in range(15)
]
TASKS = [
    {"id": r["id"], "question": f"{r['context']}\n{r['question']}", "accepted": r["answers"]["text"], "group": r["title"]}
    for r in ROWS
] + [{"id": "other", "question": "Which river? The Po.", "accepted": ["Po"], "group": "Rivers"}]


@reward
def exact(answer: str, accepted: list) -> float:
    return max(float(answer.strip().lower() == each.lower()) for each in accepted)
