"""Scenario templates of test_challenge: all need Todoist, which no other split uses."""

from __future__ import annotations

from collections.abc import Mapping

from base_world import NOTE_LINES
from plan import Plan, SolutionScript, Stage, added, answers, call, changed, only, reported, template
from templates_media import note_before, read_note

TITLES = ("paint fence", "renew passport", "plant tulips", "sharpen knives", "book tickets", "return books")


def list_tasks(script: SolutionScript, shows: Mapping[str, str]) -> None:
    tasks = call("todoist", "show_tasks", project_id=0)
    script.lookup("I look at the inbox.", f"{tasks}['no_section_tasks']", "t", shows)


def add_task(script: SolutionScript, title: str, wrong: str, thought: str = "I add the task.") -> None:
    script.act(thought, "todoist", "create_task", project_id=0, title=title)
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
    thought = f"I mark the task {titles[0]}: {ids[0]}"
    script.act(thought, "todoist", "update_task", task_id=ids[0], is_completed=True)
    script.slip(ids[0], ids[1:])
    script.complete()
    right = {"is_completed": True, "title": titles[0]}
    requirements = changed("task", "todoist.Task", ids[0], "The right task is marked done.", **right)
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
    note_id = note_before(stage, "shopping", title)
    script = stage.script()
    read_note(script, "shopping", note_id, note_id - 1)
    script.login("todoist")
    add_task(script, title, wrong, f"I add the task with content: {title}")
    script.complete()
    wording = stage.phrase(
        "Add a task to my Todoist inbox with what my note shopping says.",
        "Read my note shopping and put its text as a task into my Todoist inbox.",
    )
    return Plan(wording, new_task_requirements(stage, title), script)
