"""Scenario templates of test_challenge: all need Todoist, which no other split uses."""

from __future__ import annotations

from collections.abc import Mapping

from base_world import NOTE_LINES
from plan import Plan, Script, Stage, added, answers, labelled, only, reported, template, updated
from templates_cross import read_note
from templates_media import find_note

TITLES = ("paint fence", "renew passport", "plant tulips", "sharpen knives", "book tickets", "return books")


def list_tasks(script: Script, shows: Mapping[str, str]) -> None:
    script.add(
        "lookup",
        "I look at the inbox.",
        "for t in apis.todoist.show_tasks(project_id=0, access_token=todoist_token)['no_section_tasks']:\n"
        + labelled("t", shows),
    )


def add_task(script: Script, title: str, wrong: str, thought: str = "I add the task.") -> None:
    script.act(thought, "todoist", f"create_task(project_id=0, title={title!r}, access_token=todoist_token)")
    script.slip(title, [wrong])


def new_task_requirements(stage: Stage, title: str) -> list[dict]:
    model, user_id = "todoist.Task", stage.user_id(stage.person, "todoist")
    return [
        # A new task takes its place in the list: the engine renumbers the others, of which there are few.
        only(todoist__Task={"added": 1, "updated": 10}),
        added("A task was added to Todoist.", model, user_id=user_id),
        reported(added("The new task has the right title.", model, user_id=user_id, title=title)),
    ]


@template(difficulty=1, apps="todoist", kind="challenge")
def todoist_add(stage: Stage) -> Plan:
    title, wrong = stage.rng.sample(TITLES, 2)
    script = stage.script()
    script.docs("todoist", "create_task")
    script.login("todoist")
    add_task(script, title, wrong)
    script.complete()
    wording = stage.phrase(f"Add the task {title} to my Todoist inbox.", f"Put {title} into the inbox of my Todoist.")
    return Plan(wording, new_task_requirements(stage, title), script)


@template(difficulty=2, apps="todoist", kind="challenge")
def todoist_finish(stage: Stage) -> Plan:
    titles = stage.rng.sample(TITLES, 3)
    ids = [
        stage.before(stage.person, "todoist", "create_task", project_id=0, title=title)["task_id"] for title in titles
    ]
    script = stage.script()
    script.login("todoist")
    list_tasks(script, {"['title']": "['task_id']"})
    script.act(
        f"I mark the task {titles[0]}: {ids[0]}",
        "todoist",
        f"update_task(task_id={ids[0]}, is_completed=True, access_token=todoist_token)",
    )
    script.slip(ids[0], ids[1:])
    script.complete()
    model = "todoist.Task"
    requirements = [
        only(todoist__Task={"updated": 1}),
        updated("One task was changed.", model),
        updated("The right task was changed.", model, ids[0]),
        reported(updated("The right task is marked done.", model, ids[0], is_completed=True, title=titles[0])),
    ]
    wording = stage.phrase(
        f"Mark the task {titles[0]} in my Todoist inbox as done.",
        f"I have finished {titles[0]}. Tick it off in Todoist.",
    )
    return Plan(wording, requirements, script)


@template(difficulty=2, apps="todoist", kind="challenge")
def todoist_urgent(stage: Stage) -> Plan:
    titles = stage.rng.sample(TITLES, 3)
    for title, priority in zip(titles, ("high", "medium", "low"), strict=True):
        stage.before(stage.person, "todoist", "create_task", project_id=0, title=title, priority=priority)
    script = stage.script()
    script.login("todoist")
    list_tasks(script, {"['priority']": "['title']"})
    script.complete(titles[0], titles[1:], f"high: {titles[0]}")
    wording = stage.phrase(
        "Which task in my Todoist inbox has high priority?",
        "What is the title of the high priority task in my Todoist?",
    )
    return Plan(wording, answers(*titles, of="the tasks in the inbox"), script, titles[0])


@template(difficulty=3, apps="simple_note todoist", kind="challenge")
def todoist_from_note(stage: Stage) -> Plan:
    title, wrong = (f"buy {line}" for line in stage.rng.sample(NOTE_LINES, 2))
    note_id = stage.before(stage.person, "simple_note", "create_note", title="shopping", content=title)["note_id"]
    script = stage.script()
    script.login("simple_note")
    find_note(script, "shopping")
    read_note(script, "shopping", note_id, note_id - 1)
    script.login("todoist")
    add_task(script, title, wrong, f"I add the task with content: {title}")
    script.complete()
    wording = stage.phrase(
        "Add a task to my Todoist inbox with what my note shopping says.",
        "Read my note shopping and put its text as a task into my Todoist inbox.",
    )
    return Plan(wording, new_task_requirements(stage, title), script)
