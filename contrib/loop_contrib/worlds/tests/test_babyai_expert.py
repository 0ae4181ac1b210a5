"""BabyAI's expert, beside stand-ins of its packages: the package's bot may look for a way for ever."""

import importlib.util
import signal
import sys
from types import ModuleType, SimpleNamespace

import pytest

from loop_contrib.worlds.pool import WORKERS_FOLDER


class Bot:
    """Gives two commands, and then none for ever."""

    def __init__(self, game):
        self._given = 0

    def replan(self, action):
        self._given += 1
        while self._given > 2:
            pass
        return 2


@pytest.fixture
def babyai(monkeypatch):
    constants = {"IDX_TO_COLOR": {}, "IDX_TO_OBJECT": {}, "STATE_TO_IDX": {}}
    stands = {
        "gymnasium": {"registry": {}},
        "minigrid": {},
        "minigrid.core": {},
        "minigrid.core.constants": constants,
        "minigrid.utils": {},
        "minigrid.utils.baby_ai_bot": {"BabyAIBot": Bot},
    }
    for name, values in stands.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.syspath_prepend(str(WORKERS_FOLDER))
    spec = importlib.util.spec_from_file_location("babyai_world_alone", WORKERS_FOLDER / "babyai_world.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_a_bot_that_never_ends_is_given_up(babyai, monkeypatch):
    monkeypatch.setattr(babyai, "REPLAN_S", 0.05)
    closed = []
    episode = SimpleNamespace(game=None, step=lambda _: SimpleNamespace(done=False), close=lambda: closed.append(True))
    monkeypatch.setattr(babyai.BabyAIWorld, "start", lambda self, task: episode)
    handler = signal.getsignal(signal.SIGPROF)
    assert babyai.BabyAIWorld().expert("UnlockToUnlock_4") == ["move forward", "move forward"]
    assert closed == [True]
    assert (signal.getitimer(signal.ITIMER_PROF)[0], signal.getsignal(signal.SIGPROF)) == (0.0, handler)
