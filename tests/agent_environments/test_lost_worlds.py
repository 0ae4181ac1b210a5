"""Which losses of worlds count against a command, on losses that come when the test says so, and a clock of its own."""

import itertools

import pytest

from agent_environments import lost_worlds as rule
from agent_environments.lost_worlds import LOSSES_PER_COMMAND, NEAR_S, CommandsDoing, Loss, Losses, Recovery, WorldLost
from agent_environments.protocol import EnvironmentCrashed

PATIENCE_S = 300.0
DOUBTFUL = [Loss.KILLED, Loss.CUT, Loss.NO_ROOM]


@pytest.fixture
def clock(monkeypatch):
    """Now, in seconds: passes only where a test lets it, and in pauses."""

    class Clock:
        now = 1000.0

    async def pause(self, seconds):
        clock.now += seconds

    clock = Clock()
    monkeypatch.setattr(rule.running_time, "now", lambda: clock.now)
    monkeypatch.setattr(Losses, "pause", pause)
    return clock


def failing(*kinds, beside=lambda: None):
    """A request that loses its world once for each of these kinds, then is answered with the number of its tries."""
    tries = []

    async def once():
        tries.append(None)
        if len(tries) <= len(kinds):
            beside()
            raise WorldLost(f"lost by {kinds[len(tries) - 1]}", kinds[len(tries) - 1])
        return len(tries)

    return once


@pytest.mark.parametrize("kind", Loss)
async def test_a_loss_or_two_are_chance(clock, kind):
    losses = Losses()
    assert await Recovery(losses, "mine", PATIENCE_S).run(failing(kind, kind)) == 3
    assert losses.counts == {kind: 2}


@pytest.mark.parametrize(
    ("kind", "beside"),
    [
        *((kind, "nothing") for kind in [Loss.ENDED, *DOUBTFUL]),
        (Loss.ENDED, "a neighbour's loss"),  # it ended by itself
        (Loss.CUT, "a neighbour's loss at another time"),
        (Loss.CUT, "its own losses before"),  # a command over which worlds are lost, then a grade over which they are
    ],
)
async def test_a_command_over_which_worlds_are_lost_each_time_is_to_blame(clock, kind, beside):
    losses = Losses()

    def happens():
        apart_s = NEAR_S + 1.0 if "another time" in beside else 0.0
        clock.now += apart_s
        if "neighbour" in beside:
            losses.note("a neighbour's")
        clock.now += apart_s

    for _ in range(2 if "before" in beside else 1):
        tries = failing(*[kind] * LOSSES_PER_COMMAND, beside=happens)
        blamed = f"{LOSSES_PER_COMMAND} worlds were lost over one command: lost by {kind}"
        with pytest.raises(CommandsDoing, match=blamed):
            await Recovery(losses, "mine", PATIENCE_S).run(tries)


@pytest.mark.parametrize("kind", DOUBTFUL)
@pytest.mark.parametrize("whose", ["a neighbour's", None])
async def test_what_is_lost_while_neighbours_are_is_the_machines_doing(clock, kind, whose):
    """None: no world was to be had at that time, for nobody."""
    losses = Losses()
    tries = failing(*[kind] * 2 * LOSSES_PER_COMMAND, beside=lambda: losses.note(whose))
    assert await Recovery(losses, "mine", PATIENCE_S).run(tries) == 2 * LOSSES_PER_COMMAND + 1


@pytest.mark.parametrize("kind", [Loss.GONE, Loss.REFUSED])
async def test_what_was_lost_before_it_was_asked_never_counts(clock, kind):
    assert await Recovery(Losses(), "mine", PATIENCE_S).run(failing(*[kind] * 15)) == 16


async def test_a_machine_that_loses_worlds_for_ever_fails_the_attempt(clock):
    began = clock.now
    with pytest.raises(EnvironmentCrashed, match="no world lasted for 300 s; the last: lost by refused"):
        await Recovery(Losses(), "mine", PATIENCE_S).run(failing(*[Loss.REFUSED] * 1000))
    assert PATIENCE_S < clock.now - began < 2 * PATIENCE_S


async def test_pauses_grow(clock):
    times = []
    await Recovery(Losses(), "mine", PATIENCE_S).run(
        failing(*[Loss.REFUSED] * 7, beside=lambda: times.append(clock.now))
    )
    assert [after - before for before, after in itertools.pairwise(times)] == [0, 1, 2, 4, 8, 15]


async def test_agents_who_have_their_worlds_cut_together_do_not_excuse_each_other(clock, monkeypatch):
    """Sixteen episodes, each of which plays the same command at the same time, again and again."""
    losses = Losses()
    recoveries = [Recovery(losses, number, PATIENCE_S) for number in range(16)]
    lost = WorldLost("cut", Loss.CUT)
    blamed = set()
    for _ in range(LOSSES_PER_COMMAND + rule.EARLY_LOSSES):
        for recovery in set(recoveries) - blamed:
            try:
                await recovery._lost(lost)
            except CommandsDoing:
                blamed.add(recovery)
        clock.now += 2 * NEAR_S
    assert blamed == set(recoveries)


async def test_one_chance_is_no_suspicion_and_two_are(clock):
    losses = Losses()
    recovery = Recovery(losses, "mine", PATIENCE_S)
    assert not recovery.under_way
    await recovery._lost(WorldLost("cut", Loss.CUT))
    assert recovery.under_way
    assert not recovery.suspect
    await recovery._lost(WorldLost("cut", Loss.CUT))
    assert recovery.suspect
    losses.note("a neighbour's")
    assert not recovery.suspect
    await recovery._lost(WorldLost("ended", Loss.ENDED))
    assert recovery.suspect


async def test_a_pool_that_closes_ends_the_waiting():
    losses = Losses()
    losses.close()
    with pytest.raises(EnvironmentCrashed, match="the pool is closed"):
        await Recovery(losses, "mine", PATIENCE_S).run(failing(*[Loss.CUT] * 2))
