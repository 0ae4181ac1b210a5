"""The people of the synthetic world: names, addresses, passwords and who is what to whom. Pure and seeded.

Names and passwords are drawn from open syllables, so that a policy with a tokenizer of a few thousand entries can copy
them in a handful of tokens, and so that a person never seen in training is still written in familiar pieces.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

CONSONANTS = "bdfgklmnprstv"
VOWELS = "aeiou"
SYLLABLES = tuple(c + v for c in CONSONANTS for v in VOWELS)
LAST_NAME_ENDINGS = ("n", "r", "l", "s", "m")

ACCOUNT_APPS = ("gmail", "phone", "simple_note", "spotify", "todoist", "venmo")
RELATIONSHIPS = ("roommate", "neighbor", "cousin", "colleague", "teammate", "friend")
POOL_SHARES = {"train": 0.5, "dev": 0.125, "test_normal": 0.25, "test_challenge": 0.125}
SMALLEST_POOL = 6


@dataclass(frozen=True)
class Person:
    """One fictional person; ``passwords`` maps an app to the password of that person's account in it."""

    first_name: str
    last_name: str
    email: str
    phone_number: str
    birthday: str
    sex: str
    passwords: dict[str, str]
    card_number: int

    @property
    def name(self) -> str:
        return f"{self.first_name} {self.last_name}"

    @property
    def identity(self) -> dict[str, str]:
        """Names, e-mail and phone number, as fields of a record."""
        return {
            "first_name": self.first_name,
            "last_name": self.last_name,
            "email": self.email,
            "phone_number": self.phone_number,
        }

    def account(self, app: str) -> dict[str, str]:
        """The field by which ``app`` knows the person."""
        return {"phone_number": self.phone_number} if app == "phone" else {"email": self.email}

    def username(self, app: str) -> str:
        return self.phone_number if app == "phone" else self.email


@dataclass(frozen=True)
class Population:
    """Everybody, in the pool of the one split whose tasks they appear in, and the relationships inside each pool."""

    pools: dict[str, tuple[Person, ...]]
    contacts: dict[str, tuple[tuple[str, Person], ...]]
    """Maps an e-mail address to the (relationship, other person) pairs of its owner; every relationship once."""

    @property
    def people(self) -> list[Person]:
        return [person for pool in self.pools.values() for person in pool]

    def contact(self, person: Person, relationship: str) -> Person:
        return next(other for name, other in self.contacts[person.email] if name == relationship)

    def others(self, person: Person) -> list[Person]:
        """The distinct contacts of ``person``, in the order of their relationships."""
        return list({other.email: other for _, other in self.contacts[person.email]}.values())


def draw_population(size: int, seed: int) -> Population:
    """Draws ``size`` people and splits them over the pools; raises ValueError when a pool would be too small."""
    counts = {split: 2 * round(size * share / 2) for split, share in POOL_SHARES.items()}
    if min(counts.values()) < SMALLEST_POOL or size % 2:
        raise ValueError(f"--people {size} is too small or odd: give an even number of at least 48")
    counts["train"] += size - sum(counts.values())
    rng = random.Random(f"people {seed}")
    first_names = _unique_words(size, rng, syllables=2)
    last_names = [word + rng.choice(LAST_NAME_ENDINGS) for word in _unique_words(size, rng, syllables=2)]
    passwords = _unique_words(size * len(ACCOUNT_APPS), rng, syllables=4)
    phone_numbers = _phone_numbers(size, rng)
    people = []
    for index in range(size):
        first, last = first_names[index].capitalize(), last_names[index].capitalize()
        own = passwords[index * len(ACCOUNT_APPS) : (index + 1) * len(ACCOUNT_APPS)]
        people.append(
            Person(
                first_name=first,
                last_name=last,
                email=f"{first}.{last}@example.com".lower(),
                phone_number=phone_numbers[index],
                birthday=f"{rng.randrange(1960, 2003)}-{rng.randrange(1, 13):02d}-{rng.randrange(1, 29):02d}",
                sex=rng.choice(("male", "female")),
                passwords=dict(zip(ACCOUNT_APPS, own, strict=True)),
                card_number=4_000_000_000_000_000 + rng.randrange(10**8) * 10**5 + index,
            )
        )
    pools, start = {}, 0
    for split, count in counts.items():
        pools[split] = tuple(people[start : start + count])
        start += count
    contacts: dict[str, list[tuple[str, Person]]] = {person.email: [] for person in people}
    for pool in pools.values():
        for relationship in RELATIONSHIPS:
            for left, right in _pairs(pool, contacts, rng):
                contacts[left.email].append((relationship, right))
                contacts[right.email].append((relationship, left))
    return Population(pools, {email: tuple(pairs) for email, pairs in contacts.items()})


def _unique_words(count: int, rng: random.Random, syllables: int) -> list[str]:
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choice(SYLLABLES) for _ in range(syllables))] = None
    return list(words)


def _phone_numbers(count: int, rng: random.Random) -> list[str]:
    """Behind 555 each digit occurs once at most, so that the digits before one tell which comes next."""
    numbers: dict[str, None] = {}
    while len(numbers) < count:
        numbers["555" + "".join(rng.sample("012346789", 7))] = None
    return list(numbers)


def _pairs(pool: tuple[Person, ...], contacts: dict, rng: random.Random) -> list[tuple[Person, Person]]:
    """A random perfect matching; of fifty, the one that joins the fewest people who are joined already."""
    best, fewest = [], len(pool)
    for _ in range(50):
        order = rng.sample(pool, len(pool))
        pairs = list(zip(order[::2], order[1::2], strict=True))
        repeats = sum(any(known is right for _, known in contacts[left.email]) for left, right in pairs)
        if repeats < fewest:
            best, fewest = pairs, repeats
    return best
