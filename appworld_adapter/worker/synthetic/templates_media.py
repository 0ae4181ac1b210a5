"""Scenario templates on Spotify and Simple Note."""

from __future__ import annotations

from base_world import ADJECTIVES, NOTE_LINES, NOUNS
from plan import Plan, SolutionScript, Stage, added, answers, call, changed, only, reported, template, updated

ARTIST = "['artists'][0]['name']"
TITLES = ("groceries", "packing", "budget", "letters", "repairs", "birthday")


@template(difficulty=1, apps="spotify")
def spotify_volume(stage: Stage) -> Plan:
    current = stage.look("spotify", "show_volume")["volume"]
    volume, *wrong = stage.rng.sample([v for v in range(1, 11) if v != current], 3)
    script = stage.script()
    script.login("spotify")
    script.act("I set the volume.", "spotify", "set_volume", volume=volume)
    script.slip(volume, wrong)
    script.complete()
    model = "spotify.MusicPlayer"
    player = stage.engine.models.spotify.MusicPlayer.find_one(user_id=stage.user_id(stage.person, "spotify"))
    requirements = [
        only(spotify__MusicPlayer={"updated": 1}),
        updated("The music player's settings were changed.", model, player.id),
        reported(updated("The volume is the right one.", model, player.id, volume=volume)),
    ]
    wording = stage.phrase(f"Set my Spotify volume to {volume}.", f"Change the volume on Spotify to {volume}.")
    return Plan(wording, requirements, script)


def draw_song(stage: Stage, excluded: set[int] = frozenset()) -> tuple[str, dict]:
    """A title and the record that searching it shows first."""
    while True:
        title = f"{stage.rng.choice(ADJECTIVES)} {stage.rng.choice(NOUNS)}"
        song = stage.look("spotify", "search_songs", query=title)[0]
        if song["title"] == title and song["song_id"] not in excluded:
            return title, song


def find_song(script: SolutionScript, title: str, field: str) -> None:
    """Adds the look-up of a field of the song, for which nobody logs in."""
    songs = f"apis.spotify.search_songs(query={title!r}, page_limit=1)"
    script.lookup("I look for the song.", songs, "s", {"['title']": field})


def find_song_id(stage: Stage, script: SolutionScript, title: str) -> list[int]:
    """Adds the look-up; returns the ids that a longer search would have shown, that of the song itself first."""
    find_song(script, title, "['song_id']")
    return [hit["song_id"] for hit in stage.look("spotify", "search_songs", query=title, page_limit=3)]


@template(difficulty=1, apps="spotify")
def spotify_artist(stage: Stage) -> Plan:
    title, song = draw_song(stage)
    artist = song["artists"][0]["name"]
    script = stage.script()
    find_song(script, title, ARTIST)
    names = sorted({artist.name for artist in stage.engine.models.spotify.Artist.all()})
    shown = [hit["artists"][0]["name"] for hit in stage.look("spotify", "search_songs", query=title, page_limit=3)]
    script.complete(artist, [name for name in shown if name != artist], f"{title}: {artist}")
    wording = stage.phrase(
        f"Who is the artist of the song {title} on Spotify?", f"Which artist made {title} on Spotify?"
    )
    return Plan(wording, answers(*names, of="the artists on Spotify"), script, artist)


@template(difficulty=2, apps="spotify")
def spotify_like(stage: Stage) -> Plan:
    liked = {song["song_id"] for song in stage.look("spotify", "show_liked_songs", page_limit=20)}
    title, song = draw_song(stage, liked)
    script = stage.script()
    script.login("spotify")
    shown = find_song_id(stage, script, title)
    song_id = song["song_id"]
    script.act(f"I like the song {title}: {song_id}", "spotify", "like_song", song_id=song_id)
    script.slip(song_id, shown)
    script.complete()
    user_id = stage.user_id(stage.person, "spotify")
    requirements = [
        only(spotify__SongLike={"added": 1}, spotify__Song={"updated": 1}),
        added("A song was liked.", "spotify.SongLike", user_id=user_id),
        reported(added("The right song was liked.", "spotify.SongLike", user_id=user_id, song_id=song_id)),
    ]
    wording = stage.phrase(f"Like the song {title} on Spotify.", f"Give {title} a like on my Spotify account.")
    return Plan(wording, requirements, script)


@template(difficulty=1, apps="simple_note")
def note_create(stage: Stage) -> Plan:
    title, wrong_title = stage.rng.sample(TITLES, 2)
    content, wrong_content = stage.rng.sample(NOTE_LINES, 2)
    script = stage.script()
    script.login("simple_note")
    script.act("I write the note.", "simple_note", "create_note", title=title, content=content)
    script.slip(title, [wrong_title])
    script.slip(content, [wrong_content])
    script.complete()
    wording = stage.phrase(
        f"Write a note titled {title} with the text: {content}", f"Make a new note called {title} that says: {content}"
    )
    return Plan(wording, new_note_requirements(stage, title, content), script)


def new_note_requirements(stage: Stage, title: str, content: str) -> list[dict]:
    model, user_id = "simple_note.Note", stage.user_id(stage.person, "simple_note")
    return [
        only(simple_note__Note={"added": 1}),
        added("A note was written.", model, user_id=user_id),
        added("The note has the right title.", model, title=title),
        reported(added("The note has the right title and text.", model, title=title, content=content)),
    ]


def note_before(stage: Stage, title: str, content: str) -> int:
    """The id of a note that was there before the task."""
    return stage.before(stage.person, "simple_note", "create_note", title=title, content=content)["note_id"]


@template(difficulty=2, apps="simple_note")
def note_append(stage: Stage) -> Plan:
    title, other_title = stage.rng.sample(TITLES, 2)
    line, first_line, other_line = stage.rng.sample(NOTE_LINES, 3)
    other_id = note_before(stage, other_title, other_line)
    note_id = note_before(stage, title, first_line)
    script = stage.script()
    find_note(script, title)
    script.act(
        f"I add the line to the note {title}: {note_id}",
        "simple_note",
        "add_content_to_note",
        note_id=note_id,
        append_or_prepend="append",
        added_content=line,
    )
    script.slip(note_id, [other_id])
    script.slip(line, [other_line])
    script.complete()
    text, content = "The line stands at the end of the right note.", f"{first_line}\n{line}"
    wording = stage.phrase(
        f"Add to my note {title} this line: {line}", f"Append to the note titled {title} the words: {line}"
    )
    return Plan(wording, changed("note", "simple_note.Note", note_id, text, content=content), script)


def find_note(script: SolutionScript, title: str) -> None:
    """Adds the log-in and the look-up of the note's id."""
    script.login("simple_note")
    notes = call("simple_note", "search_notes", query=title)
    script.lookup("I look for the note.", notes, "n", {"['title']": "['note_id']"})


def read_note(script: SolutionScript, title: str, note_id: int, *other_ids: int) -> None:
    """Adds what :func:`find_note` does, and the reading; ``other_ids`` are of notes that may be taken for it."""
    find_note(script, title)
    shown = call("simple_note", "show_note", note_id=note_id)
    script.add("lookup", f"I read the note {title}: {note_id}", f"print('content:', {shown}['content'])")
    script.slip(note_id, other_ids)
