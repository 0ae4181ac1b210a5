"""Scenario templates on Spotify and Simple Note."""

from __future__ import annotations

from base_world import ADJECTIVES, NOTE_LINES, NOUNS
from plan import Plan, Stage, added, answers, only, reported, template, updated

TITLES = ("groceries", "packing", "budget", "letters", "repairs", "birthday")


@template(difficulty=1, apps="spotify")
def spotify_volume(stage: Stage) -> Plan:
    current = stage.look("spotify", "show_volume")["volume"]
    volume, *wrong = stage.rng.sample([v for v in range(1, 11) if v != current], 3)
    script = stage.script()
    script.login("spotify")
    script.act(
        "I set the volume.",
        "spotify",
        f"set_volume(volume={volume}, access_token=spotify_token)",
    )
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


def find_song(stage: Stage, script, title: str) -> list[dict]:
    """Adds the look-up; returns what a longer search would have shown, the song itself first."""
    script.lookup(
        "I look for the song.",
        "spotify",
        f"search_songs(query={title!r}, page_limit=1)",
        "s",
        {"['title']": "['song_id']"},
    )
    return stage.look("spotify", "search_songs", query=title, page_limit=3)


@template(difficulty=1, apps="spotify")
def spotify_artist(stage: Stage) -> Plan:
    title, song = draw_song(stage)
    artist = song["artists"][0]["name"]
    script = stage.script()
    script.lookup(
        "I look for the song.",
        "spotify",
        f"search_songs(query={title!r}, page_limit=1)",
        "s",
        {"['title']": "['artists'][0]['name']"},
    )
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
    hits = find_song(stage, script, title)
    song_id = song["song_id"]
    script.act(
        f"I like the song {title}: {song_id}",
        "spotify",
        f"like_song(song_id={song_id}, access_token=spotify_token)",
    )
    script.slip(song_id, [hit["song_id"] for hit in hits if hit["song_id"] != song_id])
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
    script.act(
        "I write the note.",
        "simple_note",
        f"create_note(title={title!r}, content={content!r}, access_token=simple_note_token)",
    )
    script.slip(title, [wrong_title])
    script.slip(content, [wrong_content])
    script.complete()
    user_id = stage.user_id(stage.person, "simple_note")
    requirements = [
        only(simple_note__Note={"added": 1}),
        added("A note was written.", "simple_note.Note", user_id=user_id),
        added("The note has the right title.", "simple_note.Note", title=title),
        reported(added("The note has the right title and text.", "simple_note.Note", title=title, content=content)),
    ]
    wording = stage.phrase(
        f"Write a note titled {title} with the text: {content}", f"Make a new note called {title} that says: {content}"
    )
    return Plan(wording, requirements, script)


@template(difficulty=2, apps="simple_note")
def note_append(stage: Stage) -> Plan:
    title, other_title = stage.rng.sample(TITLES, 2)
    line, first_line, other_line = stage.rng.sample(NOTE_LINES, 3)
    other_id = stage.before(stage.person, "simple_note", "create_note", title=other_title, content=other_line)[
        "note_id"
    ]
    note_id = stage.before(stage.person, "simple_note", "create_note", title=title, content=first_line)["note_id"]
    script = stage.script()
    script.login("simple_note")
    find_note(script, title)
    script.act(
        f"I add the line to the note {title}: {note_id}",
        "simple_note",
        f"add_content_to_note(note_id={note_id}, append_or_prepend='append', added_content={line!r}, "
        "access_token=simple_note_token)",
    )
    script.slip(note_id, [other_id])
    script.slip(line, [other_line])
    script.complete()
    model = "simple_note.Note"
    requirements = [
        only(simple_note__Note={"updated": 1}),
        updated("One note was changed.", model),
        updated("The right note was changed.", model, note_id),
        reported(
            updated("The line stands at the end of the right note.", model, note_id, content=f"{first_line}\n{line}")
        ),
    ]
    wording = stage.phrase(
        f"Add to my note {title} this line: {line}", f"Append to the note titled {title} the words: {line}"
    )
    return Plan(wording, requirements, script)


def find_note(script, title: str) -> None:
    script.lookup(
        "I look for the note.",
        "simple_note",
        f"search_notes(query={title!r}, access_token=simple_note_token)",
        "n",
        {"['title']": "['note_id']"},
    )
