"""Generated tasks: the same for the same seed, each particular decisive, the description not enough."""

import pytest

from loop_contrib.colbench.generator import (
    CALLS,
    CHOICES,
    FAMILIES,
    NOUNS,
    PER_FAMILY,
    code_knowing,
    generate,
)


@pytest.fixture(scope="module")
def tasks():
    """Of all splits; not made when a worker collects this file."""
    return [task for tasks in generate(0).values() for task in tasks]


def values(code, calls):
    """What ``code`` gives for each call; the name of what it raises."""
    found = []
    for call in calls:
        names = {}
        exec(code, names)
        try:
            found.append(eval(call, names))
        except Exception as error:
            found.append(type(error))
    return found


def test_sorted_and_the_same_for_the_same_seed():
    splits = generate(0)
    assert generate.__wrapped__(0) == splits
    assert generate(1) != splits
    for split, tasks in splits.items():
        assert len(tasks) == PER_FAMILY[split] * len(FAMILIES)
        assert [task.task_id for task in tasks] == sorted(task.task_id for task in tasks)


def test_no_task_is_there_twice_not_even_in_another_split(tasks):
    assert len({task.reference for task in tasks}) == len({task.task_id for task in tasks}) == len(tasks)


def test_every_particular_is_decisive_and_the_guess_does_not_pass(tasks):
    for task in tasks[::20]:
        family = next(family for family in FAMILIES if family.name in task.task_id)
        noun = next(noun for noun in NOUNS if noun in task.reference)
        assert len(task.calls) == CALLS
        assert 3 <= len(task.particulars) <= 5
        chosen = {
            particular.topic: next(
                code for code, said in CHOICES[particular.topic].items() if said == particular.answer
            )
            for particular in task.particulars
        }
        assert family.render(noun, chosen) == task.reference
        expected = values(task.reference, task.calls)
        assert not any(isinstance(value, type) for value in expected)
        for topic, code in chosen.items():
            for other in set(CHOICES[topic]) - {code}:
                assert values(family.render(noun, {**chosen, topic: other}), task.calls) != expected
        assert values(code_knowing(task, ()), task.calls) != expected


def test_who_knows_all_particulars_writes_the_reference_and_who_knows_none_guesses(tasks):
    for task in tasks[::20]:
        assert code_knowing(task, task.particulars) == task.reference
        first, *others = task.particulars
        known = code_knowing(task, others)
        assert known == task.reference.replace(f'"{first.answer.split()[-1][:-1]}"', '"amount"'), "the field is guessed"


def test_the_rows_do_not_tell_which_field_is_meant(tasks):
    for task in tasks[::10]:
        fields = {key for call in task.calls for row in eval(call.partition("(")[2][:-1]) for key in row} - {"name"}
        assert len(fields) == 2
    meant = [task.particulars[0].answer.split()[-1].rstrip(".") for task in tasks]
    first = sum(
        name == min({key for row in eval(task.calls[0].partition("(")[2][:-1]) for key in row} - {"name"}, default=name)
        for name, task in zip(meant, tasks, strict=True)
    )
    assert 0.4 < first / len(tasks) < 0.6


def test_the_description_names_no_particular(tasks):
    for task in tasks:
        for particular in task.particulars:
            assert particular.answer not in task.description
