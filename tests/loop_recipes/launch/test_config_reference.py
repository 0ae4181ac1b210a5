"""docs/config.md says of every key what the schemas say."""

from pathlib import Path

from loop_recipes.launch.config_reference import PAGES, reference, rows


def test_the_page_is_up_to_date():
    page = Path(__file__).parents[3] / "docs/config.md"
    assert page.read_text() == reference(), "run python -m loop_recipes.launch.config_reference > docs/config.md"


def test_every_key_has_its_sentence():
    silent = [key for section in PAGES.values() for key, _, _, text in rows(section) if not text.endswith(".")]
    assert silent == []
