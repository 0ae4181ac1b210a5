"""Scenario templates that need several look-ups, most of them in two apps."""

from __future__ import annotations

from base_world import NOTE_LINES, PAYMENT_REASONS
from plan import Plan, Stage, added, answers, call, only, reported, template
from templates_media import ARTIST, draw_song, find_song, find_song_id, new_note_requirements, note_before, read_note
from templates_phone import find_contact, send_text, text_requirements
from templates_venmo import PAYMENT, REQUEST, amounts


@template(difficulty=2, apps="simple_note")
def note_read(stage: Stage) -> Plan:
    titles = stage.rng.sample(("safe", "garage", "locker", "gate", "bike", "office"), 2)
    codes = stage.rng.sample(range(100, 1000), 2)
    note_ids = [note_before(stage, title, f"the code is {code}") for title, code in zip(titles, codes, strict=True)]
    script = stage.script()
    read_note(script, titles[0], *note_ids)
    script.complete(codes[0], codes[1:], f"the code is {codes[0]}")
    wording = stage.phrase(
        f"What is the code in my note {titles[0]}?", f"Read my note {titles[0]} and give me the code."
    )
    return Plan(wording, answers(*codes, of="the codes in the notes"), script, codes[0])


@template(difficulty=3, apps="spotify")
def spotify_add_to_playlist(stage: Stage) -> Plan:
    names = stage.rng.sample(("morning", "evening", "travel", "party", "study", "kitchen"), 2)
    ids = [stage.before(stage.person, "spotify", "create_playlist", title=name)["playlist_id"] for name in names]
    title, song = draw_song(stage)
    playlist_id, song_id = ids[0], song["song_id"]
    script = stage.script()
    script.login("spotify")
    shown = find_song_id(stage, script, title)
    playlists = call("spotify", "show_playlist_library")
    script.lookup("I look for the playlist.", playlists, "p", {"['title']": "['playlist_id']"})
    thought = f"I add the song {title}: {song_id} to the playlist {names[0]}: {playlist_id}"
    script.act(thought, "spotify", "add_song_to_playlist", playlist_id=playlist_id, song_id=song_id)
    script.slip(playlist_id, ids[1:])
    script.slip(song_id, shown)
    script.complete()
    model = "spotify.PlaylistSong"
    requirements = [
        only(spotify__PlaylistSong={"added": 1}),
        added("The song was added to a playlist.", model, song_id=song_id),
        added("A song was added to the right playlist.", model, playlist_id=playlist_id),
        reported(
            added("The song was added to the right playlist.", model, playlist_id=playlist_id, song_id=song_id),
        ),
    ]
    wording = stage.phrase(
        f"Add the song {title} to my Spotify playlist {names[0]}.",
        f"Put {title} into the playlist {names[0]} on Spotify.",
    )
    return Plan(wording, requirements, script)


@template(difficulty=3, apps="phone venmo")
def venmo_pay_texted(stage: Stage) -> Plan:
    relationship, receiver = stage.relation()
    amount, *wrong = amounts(stage)
    reason = stage.rng.choice(PAYMENT_REASONS)
    stage.before(
        receiver,
        "phone",
        "send_text_message",
        phone_number=stage.person.phone_number,
        message=f"you owe me {amount} dollars for {reason}",
    )
    script = stage.script()
    find_contact(script, relationship, "email", "phone")
    script.lookup(
        f"I read the messages of phone: {receiver.phone_number}",
        call("phone", "search_text_messages", query="owe", phone_number=receiver.phone_number),
        "m",
        {"text": "['message']"},
    )
    stage.slip_person(script, receiver, "phone_number")
    script.login("venmo")
    thought = f"text: you owe me {amount}, so amount: {amount}. I send the money to email: {receiver.email}"
    PAYMENT.add_to(script, stage, receiver, amount, reason, wrong, thought)
    script.complete()
    wording = stage.phrase(
        f"My {relationship} texted me what I owe. Pay it on Venmo with the note {reason}.",
        f"Pay my {relationship} on Venmo what the text message says I owe. The note is {reason}.",
    )
    return Plan(wording, PAYMENT.requirements(stage, receiver, amount, reason), script)


@template(difficulty=3, apps="simple_note venmo")
def venmo_request_noted(stage: Stage) -> Plan:
    debtor, other = stage.others(2)
    amount, other_amount, wrong = amounts(stage)
    reason = stage.rng.choice(PAYMENT_REASONS)
    lines = [f"{debtor.first_name}: {amount}", f"{other.first_name}: {other_amount}"]
    content = "\n".join(stage.rng.sample(lines, 2))
    note_id = note_before(stage, "debts", content)
    script = stage.script()
    read_note(script, "debts", note_id, note_id - 1)
    script.login("venmo")
    thought = f"I request the money. {debtor.first_name}: {amount}"
    REQUEST.add_to(script, stage, debtor, amount, reason, [other_amount, wrong], thought)
    script.complete()
    wording = stage.phrase(
        f"Request from {debtor.email} on Venmo what my note debts says {debtor.first_name} owes. The note is {reason}.",
        f"My note debts says what {debtor.first_name} owes. Ask {debtor.email} for it on Venmo with the note {reason}.",
    )
    return Plan(wording, REQUEST.requirements(stage, debtor, amount, reason), script)


@template(difficulty=3, apps="phone spotify")
def phone_text_artist(stage: Stage) -> Plan:
    relationship, receiver = stage.relation()
    title, song = draw_song(stage)
    artist = song["artists"][0]["name"]
    script = stage.script()
    find_song(script, title, ARTIST)
    find_contact(script, relationship, "phone")
    send_text(stage, script, receiver, artist, f"{title}: {artist}")
    script.complete()
    wording = stage.phrase(
        f"Text my {relationship} only the name of the artist of {title} on Spotify.",
        f"Who made {title} on Spotify? Text just the name to my {relationship}.",
    )
    return Plan(wording, text_requirements(stage, receiver, artist), script)


@template(difficulty=2, apps="phone venmo")
def venmo_request_relation(stage: Stage) -> Plan:
    return REQUEST.plan(stage, by_relation=True)


# Compositions of known steps that no training task asks for.


@template(difficulty=3, apps="phone simple_note", kind="held_out")
def note_save_email(stage: Stage) -> Plan:
    relationship, other = stage.relation()
    script = stage.script()
    find_contact(script, relationship, "email")
    script.login("simple_note")
    thought = f"I write the note with email: {other.email}"
    script.act(thought, "simple_note", "create_note", title=relationship, content=other.email)
    stage.slip_person(script, other, "email")
    script.complete()
    wording = stage.phrase(
        f"Write a note titled {relationship} with the email of my {relationship} from the phone.",
        f"Make a note called {relationship} that says the email of my {relationship}.",
    )
    return Plan(wording, new_note_requirements(stage, relationship, other.email), script)


@template(difficulty=3, apps="phone simple_note", kind="held_out")
def phone_text_note(stage: Stage) -> Plan:
    relationship, receiver = stage.relation()
    line = stage.rng.choice(NOTE_LINES)
    content = f"{line} {stage.rng.randrange(10, 100)}"
    note_id = note_before(stage, "menu", content)
    script = stage.script()
    read_note(script, "menu", note_id, note_id - 1)
    find_contact(script, relationship, "phone")
    send_text(stage, script, receiver, content, f"content: {content}")
    script.complete()
    wording = stage.phrase(
        f"Text my {relationship} the content of my note menu.",
        f"Send what my note menu says to my {relationship} by text message.",
    )
    return Plan(wording, text_requirements(stage, receiver, content), script)
