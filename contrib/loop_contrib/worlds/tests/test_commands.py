import pytest

from loop_contrib.worlds.commands import command_of, message_of
from support.texts import texts_beside

TABLES = texts_beside(__file__)


@pytest.mark.parametrize(("message", "command"), TABLES["the_command_of_a_message"])
def test_the_command_of_a_message(message, command):
    assert command_of(message) == command


def test_a_message_gives_its_command():
    assert command_of(message_of("craft 1 stick using 2 bamboo")) == "craft 1 stick using 2 bamboo"
