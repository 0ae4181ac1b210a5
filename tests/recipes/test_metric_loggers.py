"""A logger that cannot be opened ends a run at once, in one line, and not after its servers have started."""

import pytest
from omegaconf import OmegaConf

from loop_appworld import LoopAppWorldRecipe
from loop_formats.schema import ConfigError
from loop_recipes.rollouts.shared_source import SharedSource
from support.small_runs import replay_config


def test_a_logger_that_cannot_be_opened_is_named_before_the_node_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(SharedSource, "wait_ready", lambda self: pytest.fail("waited for the node"))
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    name = "torchtune.training.metric_logging.DiskLogger"
    (tmp_path / "taken").touch()
    cfg.metric_logger = [{"_component_": name, "log_dir": str(tmp_path / "taken")}]
    recipe = LoopAppWorldRecipe(cfg)
    recipe._stop.listen = lambda: None  # signals are for main threads
    with pytest.raises(ConfigError, match=rf"^metric_logger\[0\]: {name}: .*taken") as error:
        recipe.setup()
    recipe.cleanup()
    assert "\n" not in str(error.value)
