"""Scenario templates on Venmo: payments, requests, and payments whose amount stands elsewhere."""

from __future__ import annotations

from base_world import PAYMENT_REASONS
from people import Person
from plan import Plan, Script, Stage, added, answers, only, reported, template, updated
from templates_phone import find_contact


def amounts(stage: Stage, count: int = 3) -> list[int]:
    return stage.rng.sample(range(10, 100), count)


def pay(
    stage: Stage,
    script: Script,
    receiver: Person,
    amount: int,
    reason: str,
    wrong_amounts: list[int],
    thought: str = "I send the money.",
) -> None:
    strangers = [other.email for other in stage.strangers(receiver)]
    script.act(
        thought,
        "venmo",
        f"create_transaction(receiver_email={receiver.email!r}, amount={amount}, description={reason!r}, "
        "access_token=venmo_token)",
    )
    script.slip(receiver.email, strangers)
    script.slip(amount, wrong_amounts)


def payment_requirements(stage: Stage, receiver: Person, amount: int, reason: str) -> list[dict]:
    sender_id, receiver_id = stage.user_id(stage.person, "venmo"), stage.user_id(receiver, "venmo")
    model = "venmo.Transaction"
    return [
        only(
            venmo__Transaction={"added": 1},
            venmo__Notification={"added": 1},
            venmo__User={"updated": 2},
        ),
        added("A payment was made.", model, sender_id=sender_id),
        added("The payment went to the right person.", model, sender_id=sender_id, receiver_id=receiver_id),
        added("The payment has the right amount.", model, sender_id=sender_id, amount=amount),
        reported(
            added(
                "The right person got the right amount with the right note.",
                model,
                sender_id=sender_id,
                receiver_id=receiver_id,
                amount=amount,
                description=reason,
            )
        ),
    ]


@template(difficulty=1, apps="venmo")
def venmo_pay(stage: Stage) -> Plan:
    (receiver,) = stage.others(1)
    amount, *wrong = amounts(stage)
    reason = stage.rng.choice(PAYMENT_REASONS)
    script = stage.script()
    script.login("venmo")
    pay(stage, script, receiver, amount, reason, wrong)
    script.complete()
    wording = stage.phrase(
        f"Send ${amount} to {receiver.email} on Venmo with the note {reason}.",
        f"Pay {receiver.email} ${amount} on Venmo. The note is {reason}.",
    )
    return Plan(wording, payment_requirements(stage, receiver, amount, reason), script)


@template(difficulty=2, apps="phone venmo")
def venmo_pay_relation(stage: Stage) -> Plan:
    relationship, receiver = stage.relation()
    amount, *wrong = amounts(stage)
    reason = stage.rng.choice(PAYMENT_REASONS)
    script = stage.script()
    script.login("phone")
    find_contact(script, relationship, "email")
    script.login("venmo")
    pay(stage, script, receiver, amount, reason, wrong, f"I send the money to email: {receiver.email}")
    script.complete()
    wording = stage.phrase(
        f"Send ${amount} to my {relationship} on Venmo with the note {reason}.",
        f"Pay my {relationship} ${amount} on Venmo. The note is {reason}.",
    )
    return Plan(wording, payment_requirements(stage, receiver, amount, reason), script)


@template(difficulty=1, apps="venmo")
def venmo_request(stage: Stage) -> Plan:
    (debtor,) = stage.others(1)
    amount, *wrong = amounts(stage)
    reason = stage.rng.choice(PAYMENT_REASONS)
    script = stage.script()
    script.docs("venmo", "create_payment_request")
    script.login("venmo")
    ask(stage, script, debtor, amount, reason, wrong)
    script.complete()
    wording = stage.phrase(
        f"Request ${amount} from {debtor.email} on Venmo with the note {reason}.",
        f"Ask {debtor.email} for ${amount} on Venmo. The note is {reason}.",
    )
    return Plan(wording, request_requirements(stage, debtor, amount, reason), script)


def ask(
    stage: Stage,
    script: Script,
    debtor: Person,
    amount: int,
    reason: str,
    wrong_amounts: list[int],
    thought: str = "I request the money.",
) -> None:
    strangers = [other.email for other in stage.strangers(debtor)]
    script.act(
        thought,
        "venmo",
        f"create_payment_request(user_email={debtor.email!r}, amount={amount}, description={reason!r}, "
        "access_token=venmo_token)",
    )
    script.slip(debtor.email, strangers)
    script.slip(amount, wrong_amounts)


def request_requirements(stage: Stage, debtor: Person, amount: int, reason: str) -> list[dict]:
    sender_id, receiver_id = stage.user_id(stage.person, "venmo"), stage.user_id(debtor, "venmo")
    model = "venmo.PaymentRequest"
    return [
        only(venmo__PaymentRequest={"added": 1}, venmo__Notification={"added": 1}),
        added("A payment request was made.", model, sender_id=sender_id),
        added("The request went to the right person.", model, sender_id=sender_id, receiver_id=receiver_id),
        added("The request has the right amount.", model, sender_id=sender_id, amount=amount),
        reported(
            added(
                "The right person was asked for the right amount with the right note.",
                model,
                receiver_id=receiver_id,
                amount=amount,
                description=reason,
            )
        ),
    ]


@template(difficulty=2, apps="venmo")
def venmo_approve(stage: Stage) -> Plan:
    askers = stage.others(3)
    requests = {}
    for asker, amount in zip(askers, amounts(stage), strict=True):
        requests[asker.email] = stage.before(
            asker,
            "venmo",
            "create_payment_request",
            user_email=stage.person.email,
            amount=amount,
            description=stage.rng.choice(PAYMENT_REASONS),
        )["payment_request_id"]
    chosen = askers[0]
    request_id = requests[chosen.email]
    script = stage.script()
    script.login("venmo")
    script.lookup(
        f"I look for the request from {chosen.name}.",
        "venmo",
        "show_received_payment_requests(status='pending', access_token=venmo_token)",
        "r",
        {"['sender']['name']": "['payment_request_id']"},
    )
    script.act(
        f"I approve the request from {chosen.name}: {request_id}",
        "venmo",
        f"approve_payment_request(payment_request_id={request_id}, access_token=venmo_token)",
    )
    script.slip(request_id, [other for other in requests.values() if other != request_id])
    script.complete()
    sender_id = stage.user_id(stage.person, "venmo")
    receiver_id = stage.user_id(chosen, "venmo")
    requirements = [
        only(
            venmo__Transaction={"added": 1},
            venmo__Notification={"added": 1},
            venmo__User={"updated": 2},
            venmo__PaymentRequest={"updated": 1},
        ),
        updated("One payment request was settled.", "venmo.PaymentRequest"),
        updated("The right payment request was settled.", "venmo.PaymentRequest", request_id),
        reported(
            added("The right person got the money.", "venmo.Transaction", sender_id=sender_id, receiver_id=receiver_id)
        ),
    ]
    wording = stage.phrase(
        f"Approve the Venmo payment request from {chosen.name}.",
        f"There is a request from {chosen.name} on Venmo. Approve it.",
    )
    return Plan(wording, requirements, script)


@template(difficulty=2, apps="venmo")
def venmo_received(stage: Stage) -> Plan:
    payers, sums = stage.others(3), amounts(stage)
    for payer, amount in zip(payers, sums, strict=True):
        stage.before(
            payer,
            "venmo",
            "create_transaction",
            receiver_email=stage.person.email,
            amount=amount,
            description=f"my {stage.rng.choice(PAYMENT_REASONS)} share",
        )
    script = stage.script()
    script.login("venmo")
    script.lookup(
        "I look at the money received.",
        "venmo",
        "show_transactions(query='share', direction='received', access_token=venmo_token)",
        "t",
        {"['sender']['name']": "['amount']"},
    )
    script.complete(sums[0], sums[1:], f"{payers[0].name}: {sums[0]}")
    wording = stage.phrase(
        f"How much did {payers[0].name} send me on Venmo as a share?",
        f"What amount did I get from {payers[0].name} on Venmo as a share?",
    )
    return Plan(wording, answers(*sums, of="the amounts received"), script, sums[0])
