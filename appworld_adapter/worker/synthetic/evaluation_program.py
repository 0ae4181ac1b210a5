"""Grades one task of the synthetic world; the generator copies this file to every task as its evaluation.py.

What is required is data, under "requirements" in private_data.json; plan.py describes the kinds.
"""

import json


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    for requirement in private_data["requirements"]:
        with test(requirement["text"]):
            CHECKS[requirement["kind"]](test, requirement, models, ground_truth_answer)
    return test


def check_only(test, requirement, models, ground_truth_answer):
    allowed = requirement["allowed"]
    changed = sorted(models.changed_model_names())
    excess = [name for name in changed if name not in allowed]
    for name in changed:
        if name in allowed:
            for kind, records in zip(("added", "updated", "removed"), models.changed_records(name), strict=True):
                if len(records) > allowed[name].get(kind, 0):
                    excess.append(f"{name} {kind}")
    test.case(excess, "==", [])


def check_added(test, requirement, models, ground_truth_answer):
    check_records(test, requirement, models.changed_records(requirement["model"])[0])
    check_reported(test, requirement, models)


def check_updated(test, requirement, models, ground_truth_answer):
    records = models.changed_records(requirement["model"])[1]
    if requirement["id"] is not None:
        records = [record for record in records if record.id == requirement["id"]]
    check_records(test, requirement, records)
    check_reported(test, requirement, models)


def check_answer_among(test, requirement, models, ground_truth_answer):
    matching = [candidate for candidate in requirement["candidates"] if text(candidate) == text(given_answer(models))]
    test.case(len(matching), ">=", 1)


def check_answer(test, requirement, models, ground_truth_answer):
    test.answer(given_answer(models), ground_truth_answer)


def check_records(test, requirement, records):
    expected = {name: text(value) for name, value in requirement["fields"].items()}
    found = [{name: text(getattr(record, name)) for name in expected} for record in records]
    test.case(found, "==", [expected])


def check_reported(test, requirement, models):
    if requirement["reported"]:
        task = models.end.supervisor.Task.first()
        test.case([task.status, given_answer(models)], "==", ["success", None])


def given_answer(models):
    return json.loads(models.end.supervisor.Task.first().answer)


def text(value):
    """Text without regard to case, with 12 and 12.0 the same."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:g}"
    return str(value).strip().lower()


CHECKS = {
    "only": check_only,
    "added": check_added,
    "updated": check_updated,
    "answer_among": check_answer_among,
    "answer": check_answer,
}
