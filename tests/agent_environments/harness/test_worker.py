"""A worker and its node: what it waits out, and what ends it. tests/rollout_server/endpoint plays real episodes."""

import httpx
import pytest

from agent_environments.harness import worker
from agent_environments.harness.worker import AgentEpisode, play_episodes, take_episode

EPISODE = AgentEpisode("t_1", "train", "http://127.0.0.1:1/v1", "sk-1", "c1.t_1.0", "c1", 0)


def refused(status):
    request = httpx.Request("POST", "http://node/v1/episodes")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


@pytest.fixture
def finished(monkeypatch):
    """What episodes are finished with; the node answers nothing else."""
    told = []
    monkeypatch.setattr(AgentEpisode, "finish", lambda self, **worth: told.append(worth))
    monkeypatch.setattr(worker, "PAUSE_S", 0.0)
    return told


def play_through(monkeypatch, answers):
    """Until all answers of the node were given."""

    def answer(*_):
        one = answers.pop(0)
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(worker, "take_episode", answer)
    return play_episodes("http://node", lambda episode: {"reward": 1.0}, "secret", lambda: not answers)


def test_a_node_that_is_started_again_is_waited_for(monkeypatch, finished):
    answers = [httpx.ConnectError("gone"), refused(503), None, EPISODE, httpx.ReadTimeout("slow"), EPISODE]
    assert play_through(monkeypatch, answers) == 2
    assert finished == [{"reward": 1.0}] * 2


@pytest.mark.parametrize("given_up", [False, True])
def test_a_refusal_ends_it_and_so_does_a_node_that_stays_away(monkeypatch, finished, given_up):
    if given_up:
        monkeypatch.setattr(worker, "RECONNECT_S", -1.0)
    with pytest.raises(httpx.HTTPError):
        play_through(monkeypatch, [httpx.ConnectError("gone") if given_up else refused(409), EPISODE])
    assert not finished


def test_an_episode_whose_end_cannot_be_told_does_not_end_the_worker(monkeypatch, finished):
    def gone(*_, **__):
        raise httpx.ConnectError("gone")

    monkeypatch.setattr(AgentEpisode, "finish", gone)
    assert play_through(monkeypatch, [EPISODE]) == 1


def test_without_a_secret_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("ROLLOUT_SERVER_TOKEN", raising=False)
    with pytest.raises(ValueError, match="set ROLLOUT_SERVER_TOKEN"):
        take_episode("http://127.0.0.1:1")
