"""The game that `loop init` copies; its further tests are those that `loop init` writes."""

from agent_environments.tools.guess_number import Game


def test_a_game_ends():
    game = Game()
    game.reset({"number": 3})
    assert [game.guess(number) for number in (4, 2, 3, 3)] == ["Lower.", "Higher.", "Found.", "The game is over."]
    game.reset({"number": 3})
    assert [game.guess(1) for _ in range(6)][4:] == ["Higher.", "The game is over."]
    assert not game.found
