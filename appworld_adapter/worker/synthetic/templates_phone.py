"""Scenario templates on the phone: contacts, messages, alarms."""

from __future__ import annotations

from base_world import MESSAGES
from people import Person
from plan import Plan, SolutionScript, Stage, added, answers, call, changed, only, reported, template


def clock(stage: Stage) -> str:
    return f"{stage.rng.randrange(5, 12):02d}:{stage.rng.choice((0, 10, 20, 30, 40, 50)):02d}"


LABELS = ("swim", "yoga", "dentist", "market", "train", "medicine")


@template(difficulty=1, apps="phone")
def phone_set_alarm(stage: Stage) -> Plan:
    time, label = clock(stage), stage.rng.choice(LABELS)
    script = stage.script()
    script.docs("phone", "create_alarm")
    script.login("phone")
    script.act("I set the alarm.", "phone", "create_alarm", time=time, label=label)
    script.slip(time, [clock(stage), clock(stage)])
    script.slip(label, [other for other in LABELS if other != label])
    script.complete()
    user_id = stage.user_id(stage.person, "phone")
    requirements = [
        only(phone__Alarm={"added": 1}),
        added("An alarm was set on the phone.", "phone.Alarm", user_id=user_id),
        added("The new alarm rings at the right time.", "phone.Alarm", time=time),
        reported(added("The new alarm has the right label and time.", "phone.Alarm", label=label, time=time)),
    ]
    wording = stage.phrase(
        f"Set an alarm on my phone for {time} with the label {label}.",
        f"I need a phone alarm labelled {label} at {time}.",
    )
    return Plan(wording, requirements, script)


@template(difficulty=2, apps="phone")
def phone_move_alarm(stage: Stage) -> Plan:
    labels = stage.rng.sample(LABELS, 2)
    for label in labels:
        stage.before(stage.person, "phone", "create_alarm", time=clock(stage), label=label)
    alarms = stage.look("phone", "show_alarms", page_limit=20)
    alarm = next(alarm for alarm in alarms if alarm["label"] == labels[0])
    taken = {alarm["time"] for alarm in alarms}
    time = clock(stage)
    while time in taken:
        time = clock(stage)
    alarm_id, other_ids = alarm["alarm_id"], [a["alarm_id"] for a in alarms if a is not alarm]
    script = stage.script()
    script.login("phone")
    script.lookup("I look for the alarm.", call("phone", "show_alarms"), "a", {"['label']": "['alarm_id']"})
    script.act(f"I move the alarm {labels[0]}: {alarm_id}", "phone", "update_alarm", alarm_id=alarm_id, time=time)
    script.slip(alarm_id, other_ids)
    script.slip(time, [clock(stage), clock(stage)])
    script.complete()
    requirements = changed("alarm", "phone.Alarm", alarm_id, "The right alarm rings at the new time.", time=time)
    wording = stage.phrase(
        f"Move my phone alarm {labels[0]} to {time}.", f"My {labels[0]} alarm should ring at {time}. Change it."
    )
    return Plan(wording, requirements, script)


@template(difficulty=1, apps="phone")
def phone_who_is(stage: Stage) -> Plan:
    relationship, other = stage.relation()
    script = stage.script()
    find_contact(script, relationship, "name")
    names = [contact.name for contact in stage.engine.population.others(stage.person)]
    script.complete(other.name, [name for name in names if name != other.name], f"name: {other.name}")
    wording = stage.phrase(
        f"What is the full name of my {relationship}?", f"Give me the first and last name of my {relationship}."
    )
    return Plan(wording, answers(*names, of="the names in the contact book"), script, other.name)


@template(difficulty=2, apps="phone")
def phone_text_relation(stage: Stage) -> Plan:
    relationship, other = stage.relation()
    message = stage.rng.choice(MESSAGES)
    script = stage.script()
    find_contact(script, relationship, "phone")
    send_text(stage, script, other, message)
    script.complete()
    wording = stage.phrase(
        f"Text my {relationship} this message: {message}", f"Send my {relationship} a phone message: {message}"
    )
    return Plan(wording, text_requirements(stage, other, message), script)


CONTACT_FIELDS = {"name": "['first_name'] ['last_name']", "email": "['email']", "phone": "['phone_number']"}


def find_contact(script: SolutionScript, relationship: str, *shows: str) -> None:
    """Adds the log-in and the look-up of what ``shows`` names of :data:`CONTACT_FIELDS`."""
    script.login("phone")
    contacts = call("phone", "search_contacts", relationship=relationship)
    script.lookup(f"I look for the {relationship}.", contacts, "c", {name: CONTACT_FIELDS[name] for name in shows})


def send_text(stage: Stage, script: SolutionScript, receiver: Person, message: str, found: str = "") -> None:
    """Adds the sending; ``found`` are the words with which an observation told the message."""
    number = receiver.phone_number
    thought = f"I send {found or 'the message'} to phone: {number}"
    script.act(thought, "phone", "send_text_message", phone_number=number, message=message)
    stage.slip_person(script, receiver, "phone_number")
    script.slip(message, ["hello"])


def text_requirements(stage: Stage, receiver, message: str) -> list[dict]:
    sender_id, receiver_id = stage.user_id(stage.person, "phone"), stage.user_id(receiver, "phone")
    model = "phone.GlobalTextMessage"
    return [
        only(phone__GlobalTextMessage={"added": 1}, phone__UserTextMessage={"added": 2}),
        added("A text message was sent.", model, sender_id=sender_id),
        added("The message went to the right person.", model, receiver_id=receiver_id),
        reported(
            added("The right person got the right message.", model, receiver_id=receiver_id, message=message),
        ),
    ]
