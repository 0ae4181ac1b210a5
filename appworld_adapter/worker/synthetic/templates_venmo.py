"""Scenario templates on Venmo: payments, requests, and payments whose amount stands elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

from base_world import PAYMENT_REASONS
from people import Person
from plan import Plan, SolutionScript, Stage, added, answers, call, only, reported, template, updated
from templates_phone import find_contact


def amounts(stage: Stage) -> list[int]:
    """Three different ones: that of the task, and two that a careless agent may write for it."""
    return stage.rng.sample(range(10, 100), 3)


@dataclass(frozen=True)
class MoneyAction:
    """How money moves between two people: sent by a payment, or asked for by a request.

    ``counterpart`` is the argument of ``api`` that names the other person. ``changes`` and ``texts`` are of the
    requirements, of which the last one names the sender or not. ``wordings`` ask for it.
    """

    api: str
    counterpart: str
    thought: str
    preposition: str
    model: str
    changes: dict[str, dict[str, int]]
    texts: tuple[str, str, str, str]
    names_sender: bool
    wordings: tuple[str, str]

    def add_to(
        self,
        script: SolutionScript,
        stage: Stage,
        person: Person,
        amount: int,
        reason: str,
        wrong_amounts: list[int],
        thought: str = "",
    ) -> None:
        """Adds the turn that moves the money, with ``thought`` in place of the usual one."""
        arguments = {self.counterpart: person.email, "amount": amount, "description": reason}
        script.act(thought or f"{self.thought}.", "venmo", self.api, **arguments)
        stage.slip_person(script, person, "email")
        script.slip(amount, wrong_amounts)

    def requirements(self, stage: Stage, person: Person, amount: int, reason: str) -> list[dict]:
        sender = {"sender_id": stage.user_id(stage.person, "venmo")}
        receiver = {"receiver_id": stage.user_id(person, "venmo")}
        made, right_person, right_amount, all_right = self.texts
        known = sender | receiver if self.names_sender else receiver
        return [
            only(**self.changes),
            added(made, self.model, **sender),
            added(right_person, self.model, **sender, **receiver),
            added(right_amount, self.model, **sender, amount=amount),
            reported(added(all_right, self.model, **known, amount=amount, description=reason)),
        ]

    def plan(self, stage: Stage, *, by_relation: bool = False, with_docs: bool = False) -> Plan:
        """The task to do it with somebody known by e-mail, or else by relation, whom the phone knows."""
        if by_relation:
            relationship, person = stage.relation()
            whom = f"my {relationship}"
        else:
            (person,) = stage.others(1)
            whom = person.email
        amount, *wrong = amounts(stage)
        reason = stage.rng.choice(PAYMENT_REASONS)
        script, thought = stage.script(), ""
        if with_docs:
            script.docs("venmo", self.api)
        if by_relation:
            find_contact(script, relationship, "email")
            thought = f"{self.thought} {self.preposition} email: {person.email}"
        script.login("venmo")
        self.add_to(script, stage, person, amount, reason, wrong, thought)
        script.complete()
        wording = stage.phrase(*self.wordings).format(amount=amount, whom=whom, reason=reason)
        return Plan(wording, self.requirements(stage, person, amount, reason), script)


PAYMENT = MoneyAction(
    api="create_transaction",
    counterpart="receiver_email",
    thought="I send the money",
    preposition="to",
    model="venmo.Transaction",
    changes={"venmo.Transaction": {"added": 1}, "venmo.Notification": {"added": 1}, "venmo.User": {"updated": 2}},
    texts=(
        "A payment was made.",
        "The payment went to the right person.",
        "The payment has the right amount.",
        "The right person got the right amount with the right note.",
    ),
    names_sender=True,
    wordings=(
        "Send ${amount} to {whom} on Venmo with the note {reason}.",
        "Pay {whom} ${amount} on Venmo. The note is {reason}.",
    ),
)
REQUEST = MoneyAction(
    api="create_payment_request",
    counterpart="user_email",
    thought="I request the money",
    preposition="from",
    model="venmo.PaymentRequest",
    changes={"venmo.PaymentRequest": {"added": 1}, "venmo.Notification": {"added": 1}},
    texts=(
        "A payment request was made.",
        "The request went to the right person.",
        "The request has the right amount.",
        "The right person was asked for the right amount with the right note.",
    ),
    names_sender=False,
    wordings=(
        "Request ${amount} from {whom} on Venmo with the note {reason}.",
        "Ask {whom} for ${amount} on Venmo. The note is {reason}.",
    ),
)


@template(difficulty=1, apps="venmo")
def venmo_pay(stage: Stage) -> Plan:
    return PAYMENT.plan(stage)


@template(difficulty=2, apps="phone venmo")
def venmo_pay_relation(stage: Stage) -> Plan:
    return PAYMENT.plan(stage, by_relation=True)


@template(difficulty=1, apps="venmo")
def venmo_request(stage: Stage) -> Plan:
    return REQUEST.plan(stage, with_docs=True)


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
        call("venmo", "show_received_payment_requests", status="pending"),
        "r",
        {"['sender']['name']": "['payment_request_id']"},
    )
    thought = f"I approve the request from {chosen.name}: {request_id}"
    script.act(thought, "venmo", "approve_payment_request", payment_request_id=request_id)
    script.slip(request_id, [*requests.values()])
    script.complete()
    sender_id = stage.user_id(stage.person, "venmo")
    receiver_id = stage.user_id(chosen, "venmo")
    requirements = [
        only(**PAYMENT.changes, venmo__PaymentRequest={"updated": 1}),
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
    received = call("venmo", "show_transactions", query="share", direction="received")
    script.lookup("I look at the money received.", received, "t", {"['sender']['name']": "['amount']"})
    script.complete(sums[0], sums[1:], f"{payers[0].name}: {sums[0]}")
    wording = stage.phrase(
        f"How much did {payers[0].name} send me on Venmo as a share?",
        f"What amount did I get from {payers[0].name} on Venmo as a share?",
    )
    return Plan(wording, answers(*sums, of="the amounts received"), script, sums[0])
