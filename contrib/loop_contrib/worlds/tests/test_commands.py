import pytest

from loop_contrib.worlds.commands import command_of, message_of


@pytest.mark.parametrize(
    ("message", "command"),
    [
        ("look", "look"),
        ("I shall look.\nAction: look around ", "look around"),
        ("Thought: a\nAction: one\nthen\naction:two\n", "two"),
        ("I think.\n\nlook\n", "look"),
        ("Action:", ""),
        ("", ""),
        (" \n\n", ""),
        ("The reaction: none\ngo", "go"),
    ],
)
def test_the_command_of_a_message(message, command):
    assert command_of(message) == command


def test_a_message_gives_its_command():
    assert command_of(message_of("craft 1 stick using 2 bamboo")) == "craft 1 stick using 2 bamboo"
