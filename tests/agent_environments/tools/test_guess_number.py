"""The game that `loop init` copies; its further tests are those that `loop init` writes."""

from agent_environments.tools.guess_number import Game


def test_a_game_ends():
    game = Game()
    game.reset({"number": 3})
    assert [game.guess(text) for text in ("Is it 4 or 3?", "2.", "no idea", "3")] == [
        "Lower.",
        "Higher.",
        "Say a number.",
        None,
    ]
    assert game.found
    game.reset({"number": 3})
    assert [game.guess("9" * 5000) for _ in range(5)][3:] == ["Lower.", None]
    assert not game.found
