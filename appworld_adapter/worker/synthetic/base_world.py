"""The base world: every account, contact, message, payment, note and song that all tasks start from.

Whatever an app offers a public function for is done through that function, the same one an agent calls. The engine's
models are written directly only where there is none: the bank's and the supervisor's own records, the API
documentation, artists and songs.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Callable
from typing import Any

import freezegun
from appworld.apps import get_all_apps
from appworld.apps.api_lib import CompanyNotifier, set_local_random_seed
from appworld.apps.model_lib import CachedDBHandler, ModelHashHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.requester import Requester
from people import ACCOUNT_APPS, SYLLABLES, Person, Population

BASE_HOME = ":memory:base"
OPENING = datetime.datetime(2023, 1, 9, 9, 0, 0)
ALWAYS_VALID_LOGIN = datetime.datetime(2090, 1, 1)

GENRES = ("rock", "jazz", "folk", "pop")
ADJECTIVES = ("blue", "green", "silent", "golden", "little", "distant", "warm", "broken")
NOUNS = ("river", "window", "garden", "harbor", "winter", "mirror", "island", "candle")
PAYMENT_REASONS = ("lunch", "rent", "books", "tickets", "coffee", "pizza", "taxi", "gifts", "paint", "fruit")
ALARM_LABELS = ("gym", "work", "school", "run", "bus")
MESSAGES = ("see you soon", "call me later", "the train is late", "thanks for today", "dinner is ready", "i am home")
NOTE_TITLES = ("plans", "ideas", "recipes", "travel", "movies", "chores")
NOTE_LINES = ("old bridge", "two lemons", "red door", "fresh bread", "long walk", "new lamp")
TODO_TITLES = ("wash car", "buy stamps", "fix lamp", "call bank", "feed cat", "clean desk", "order tea", "sell bike")


class Engine:
    """The engine's apps over one in-memory world at a time, driven as any of its people at any moment."""

    def __init__(self, population: Population) -> None:
        self.population = population
        self.apps = list(get_all_apps())
        self.models = ModelCollection.load(to_db_home_path=BASE_HOME, load_apps=self.apps, create_db=True)
        self._requester = Requester(
            to_db_home_path=BASE_HOME,
            from_db_home_path=BASE_HOME,
            load_apps=self.apps,
            raise_on_failure=True,
            max_num_requests=None,
        )
        # Freezing time walks through all loaded modules; doing it once and moving the hands is fifteen times cheaper
        # than doing it for every call.
        self._clock = freezegun.freeze_time(OPENING).start()
        self._tokens: dict[tuple[str, str], str] = {}

    def set_time(self, at: datetime.datetime) -> None:
        self._clock.move_to(at)

    def open_copy(self, base_folder: str, name: str) -> None:
        """Makes a fresh in-memory copy of the saved base world the current one, with its changes tracked."""
        self.models = ModelCollection.load(
            to_db_home_path=f":memory:{name}", from_db_home_path=base_folder, load_apps=self.apps
        )

    def close_copy(self) -> None:
        self.models.close()
        CachedDBHandler.reset()
        ModelHashHandler.reset()

    def request(self, app: str, api: str, **arguments: Any) -> Any:
        """Calls one public API function of an app; raises when the app refuses."""
        return self._requester.request(_app_name=app, _api_name=api, **arguments)

    def call(self, person: Person, app: str, api: str, at: datetime.datetime, **arguments: Any) -> Any:
        """Calls one API as ``person`` at the moment ``at``."""
        key = (person.email, app)
        if key not in self._tokens:
            # A log-in far in the future gives a token that no moment of the world finds expired.
            self.set_time(ALWAYS_VALID_LOGIN)
            username, password = person.username(app), person.passwords[app]
            self._tokens[key] = self.request(app, "login", username=username, password=password)["access_token"]
        self.set_time(at)
        return self.request(app, api, access_token=self._tokens[key], **arguments)

    def user_id(self, person: Person, app: str) -> int:
        """The id of ``person``'s account in ``app``."""
        return self.models[app].User.find_one(**person.account(app)).id


def build_base(engine: Engine, seed: int, folder: str, step: Callable[[], None]) -> None:
    """Fills the base world and saves its twelve databases into ``folder``; ``step`` is called once per person."""
    rng = random.Random(f"world {seed}")
    set_local_random_seed(seed)
    for company in ("gmail", "simple_note", "spotify", "todoist", "venmo"):
        CompanyNotifier(company).create_accounts(skip_if_exists=True)
    _add_api_docs(engine)
    _add_songs(engine, rng)
    for person in engine.population.people:
        _sign_up(engine, person)
        step()
    for number, person in enumerate(engine.population.people):
        _live(engine, person, rng, OPENING + datetime.timedelta(days=1, minutes=7 * number))
        step()
    os.makedirs(folder, exist_ok=True)
    engine.models.save(folder, delete_if_exists=True, save_model_hashes=True)
    engine.models.stop_db_tracker()


def _add_api_docs(engine: Engine) -> None:
    """What the api_docs app looks up: the documentation of the installed engine itself."""
    for documents in ApiDocCollection.build().values():
        for document in documents.values():
            fields = {"app_name_" if name == "app_name" else name: value for name, value in document.items()}
            engine.models.api_docs.ApiDoc.create_save(**fields)


def _add_songs(engine: Engine, rng: random.Random) -> None:
    spotify = engine.models.spotify
    artists = []
    for number in range(12):
        name = "".join(rng.choice(SYLLABLES) for _ in range(2)).capitalize() + " " + rng.choice(NOUNS).capitalize()
        artists.append(spotify.Artist.create_save(name=name, genre=GENRES[number % len(GENRES)]))
    for adjective in ADJECTIVES:
        for noun in NOUNS:
            artist = rng.choice(artists)
            spotify.Song.create_save(
                title=f"{adjective} {noun}",
                artist_ids=[artist.id],
                duration=rng.randrange(120, 300),
                release_date=datetime.datetime(rng.randrange(1990, 2022), rng.randrange(1, 13), 1),
                genre=artist.genre,
                play_count=rng.randrange(1, 1000),
            )


def _sign_up(engine: Engine, person: Person) -> None:
    engine.set_time(OPENING)
    admin = engine.models.admin
    user = admin.MainUser.create_save(**person.identity, birthday=person.birthday, sex=person.sex)
    for app in ACCOUNT_APPS:
        admin.AccountPassword.create_save(main_user_id=user.id, account_name=app, password=person.passwords[app])
        contact = person.account(app)
        names = {"first_name": person.first_name, "last_name": person.last_name}
        engine.request(app, "signup", **names, password=person.passwords[app], **contact)
        account = engine.models[app].User.find_one(**contact)
        if getattr(account, "verified", True) is False:
            # The code went out by e-mail, which is where its reader would look it up.
            engine.request(app, "verify_account", **contact, verification_code=account.verification_code)
    card = {
        "card_name": "Visa",
        "owner_name": person.name,
        "card_number": person.card_number,
        "expiry_year": 2030,
        "expiry_month": 12,
        "cvv_number": 100 + user.id % 900,
    }
    engine.request("admin", "add_payment_card", main_user_id=user.id, balance=5000, **card)
    card_id = engine.call(person, "venmo", "add_payment_card", OPENING, **card)["payment_card_id"]
    engine.call(person, "venmo", "add_to_venmo_balance", OPENING, amount=1000, payment_card_id=card_id)


def _live(engine: Engine, person: Person, rng: random.Random, at: datetime.datetime) -> None:
    """What ``person`` did before any task began."""
    population = engine.population
    others = population.others(person)
    for other in others:
        names = [name for name, contact in population.contacts[person.email] if contact is other]
        contact = other.identity | {"relationships": names, "birthday": other.birthday}
        engine.call(person, "phone", "add_contact", at, **contact)
        engine.call(person, "venmo", "add_friend", at, user_email=other.email)
    for label in rng.sample(ALARM_LABELS, 2):
        clock = f"{rng.randrange(5, 11):02d}:{rng.choice((0, 15, 30, 45)):02d}"
        engine.call(person, "phone", "create_alarm", at, time=clock, label=label)
    friend, payee = rng.sample(others, 2)
    engine.call(
        person, "phone", "send_text_message", at, phone_number=friend.phone_number, message=rng.choice(MESSAGES)
    )
    engine.call(
        person,
        "venmo",
        "create_transaction",
        at,
        receiver_email=payee.email,
        amount=rng.randrange(5, 60),
        description=rng.choice(PAYMENT_REASONS),
    )
    for title in rng.sample(NOTE_TITLES, 2):
        engine.call(person, "simple_note", "create_note", at, title=title, content=rng.choice(NOTE_LINES))
    songs = rng.sample(range(1, len(ADJECTIVES) * len(NOUNS) + 1), 3)
    playlist = engine.call(person, "spotify", "create_playlist", at, title=rng.choice(NOUNS) + " mix")["playlist_id"]
    engine.call(person, "spotify", "add_song_to_playlist", at, playlist_id=playlist, song_id=songs[0])
    engine.call(person, "spotify", "like_song", at, song_id=songs[1])
    engine.call(person, "spotify", "set_volume", at, volume=rng.randrange(2, 9))
    for title in rng.sample(TODO_TITLES, 2):
        engine.call(person, "todoist", "create_task", at, project_id=0, title=title)
