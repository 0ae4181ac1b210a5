"""What a recipe says when it was stopped."""

from types import SimpleNamespace

import pytest

from loop_recipes.algorithm.training_recipe import TrainingRecipe
from loop_recipes.paths import TYPED


@pytest.mark.parametrize(
    ("verb", "resumes", "what"),
    [(None, True, "the same command"), ("loop train", False, "resume_from_checkpoint=True")],
)
def test_a_run_that_was_stopped_says_what_goes_on(capsys, monkeypatch, verb, resumes, what):
    if verb is not None:
        monkeypatch.setenv(TYPED, verb)
    recipe = TrainingRecipe.__new__(TrainingRecipe)
    recipe.name, recipe._rank, recipe._stop = "loop_appworld", 0, SimpleNamespace(done=lambda: None)
    recipe._config = SimpleNamespace(resume_from_checkpoint=resumes)
    recipe.stopped("while waiting")
    assert capsys.readouterr().err == f"{verb or 'loop_appworld'}: stopped while waiting; {what} goes on\n"
