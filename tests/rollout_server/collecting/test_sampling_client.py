"""The node's policy as a policy client: ids as they were sampled, errors as reasons, versions acquired and released."""

from types import SimpleNamespace

import pytest

from agent_environments.protocol import Message
from loop_formats.collection_request import CollectionRequest, Limits
from model_families.chat import open_chat
from model_families.chat.messages import ChatMessage
from rollout_server.collecting.policy_client import ContextFull, EpisodeFailed
from rollout_server.collecting.policy_sampler import EpisodeServices
from rollout_server.collecting.sampling_client import SamplingClient
from rollout_server.inference.router import BadLogprob, Generation, RequestRefused, ServerUnavailable
from rollout_server.metrics import NodeMetrics
from rollout_server.policies.store import UnknownPolicy

pytestmark = pytest.mark.slow

OPENING = [Message("system", "You count."), Message("user", "Count to three.")]


class ScriptedRouter:
    """Answers with the next item of ``answers``: ids, or an exception. Keeps what it was asked and told."""

    def __init__(self, *answers):
        self.answers = iter(answers)
        self.asked: list[dict] = []
        self.released: list[str] = []

    async def generate(self, **request):
        self.asked.append({**request, "token_ids": list(request["token_ids"])})
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return Generation(answer, [-0.25] * len(answer), "stop", "s1", cached_tokens=3, seconds=0.5)

    def release(self, episode_id):
        self.released.append(episode_id)


class Versions:
    """A store whose newest version grows by one with every look."""

    def __init__(self):
        self.newest, self.held, self.seen = 0, [], []

    def latest(self):
        self.newest += 1
        return self.newest

    def acquire(self, version):
        self.held.append(version)
        self.seen.append(version)
        return f"policy-{version}"

    def release(self, version):
        self.held.remove(version)


@pytest.fixture(scope="module")
def tokens(policy):
    return open_chat(policy / "model")


def client_of(tokens, router, pinned="policy-4", policies=None, **limits):
    services = EpisodeServices(SimpleNamespace(), tokens, router, policies or Versions(), NodeMetrics())
    values = {"max_turns": 4, "max_tokens_per_turn": 8, "max_context": 1000, **limits}
    request = CollectionRequest(id="c", tasks=["t_1"], rollouts_per_task=1, policy_version=4, limits=Limits(**values))
    return SamplingClient(request, pinned, services)


async def test_sampled_ids_are_appended_as_they_came(tokens):
    """Ids that another encoder would merge stay as they were sampled; what is inserted is never marked as sampled."""
    letters = [tokens.encode_text(letter)[0] for letter in "one"]
    closed, capped = [*letters, tokens.turn_end], letters
    router = ScriptedRouter(closed, capped, closed)
    policy_client = client_of(tokens, router)
    policy_client.begin("c/t_1/0.0", OPENING)
    prompt = tokens.prompt(OPENING)
    first = await policy_client.speak(seed=11)
    turn = first.turn
    assert (first.text, turn.start, turn.end) == ("one", len(prompt), len(prompt) + 4)
    assert (turn.policy_version, turn.server, turn.sampling_seconds, turn.cached_tokens) == (4, "s1", 0.5, 3)
    policy_client.hear("two")
    await policy_client.speak(seed=12)
    policy_client.hear("three")
    await policy_client.speak(seed=13)
    expected = prompt
    for sampled, said in ((closed, "two"), (capped, "three")):
        expected = [*expected, *sampled, *tokens.extension(expected, sampled, [ChatMessage("user", said)])]
    [record] = policy_client.record()
    assert record.token_ids == [*expected, *closed]
    assert [asked["token_ids"] for asked in router.asked][2] == expected, "the trained sequence is the served one"
    assert [(asked["seed"], asked["model"]) for asked in router.asked] == [
        (11, "policy-4"),
        (12, "policy-4"),
        (13, "policy-4"),
    ]
    assert sum(record.mask) == policy_client.sampled_tokens == 11
    assert record.sampler_logprobs == [-0.25 * sampled for sampled in record.mask]
    policy_client.close()
    assert router.released == ["c/t_1/0.0"]


async def test_the_context_bounds_prompt_turn_and_observation(tokens):
    size = len(tokens.prompt(OPENING))
    with pytest.raises(ContextFull, match=f"the prompt's {size} tokens fill max_context {size}"):
        client_of(tokens, ScriptedRouter(), max_context=size).begin("e", OPENING)
    router = ScriptedRouter([tokens.turn_end])
    policy_client = client_of(tokens, router, max_context=size + 5)
    policy_client.begin("e", OPENING)
    await policy_client.speak(seed=1)
    assert router.asked[0]["max_tokens"] == 5, "what is left, not max_tokens_per_turn"
    with pytest.raises(ContextFull):
        policy_client.hear("an observation of many words")
    assert len(policy_client.record()[0].token_ids) == size + 1, "the sequence ends with the turn"


@pytest.mark.parametrize(
    ("error", "expected", "reason"),
    [
        (BadLogprob("NaN"), EpisodeFailed, "bad_logprob"),
        (ServerUnavailable("gave up"), EpisodeFailed, "server_error"),
        (RequestRefused("HTTP 400"), EpisodeFailed, "request_refused"),
        (UnknownPolicy("no version 4"), EpisodeFailed, "server_error"),
    ],
)
async def test_what_went_wrong_has_its_reason(tokens, error, expected, reason):
    policy_client = client_of(tokens, ScriptedRouter(error))
    policy_client.begin("e", OPENING)
    with pytest.raises(expected) as raised:
        await policy_client.speak(seed=1)
    assert str(error) in str(raised.value)
    assert getattr(raised.value, "reason", None) == reason
    assert policy_client.sampled_tokens == 0


async def test_latest_mode_holds_each_turns_version_for_its_turn(tokens):
    policies = Versions()
    router = ScriptedRouter([tokens.turn_end], BadLogprob("NaN"))
    policy_client = client_of(tokens, router, pinned=None, policies=policies)
    policy_client.begin("e", OPENING)
    assert (await policy_client.speak(seed=1)).turn.policy_version == 1
    policy_client.hear("go on")
    with pytest.raises(EpisodeFailed):
        await policy_client.speak(seed=2)
    assert [asked["model"] for asked in router.asked] == ["policy-1", "policy-2"]
    assert (policies.seen, policies.held) == ([1, 2], [])


async def test_megabytes_that_cannot_fit_are_not_encoded(tokens, monkeypatch):
    encoded = []
    encode = tokens._encode
    monkeypatch.setattr(tokens, "_encode", lambda text: encoded.append(len(text)) or encode(text))
    huge = "word " * 1_000_000
    with pytest.raises(ContextFull, match="fill max_context 1000"):
        client_of(tokens, ScriptedRouter()).begin("c/t_1/0.0", [*OPENING, Message("user", huge)])
    policy_client = client_of(tokens, ScriptedRouter([tokens.turn_end]))
    policy_client.begin("c/t_1/0.0", OPENING)
    await policy_client.speak(seed=1)
    with pytest.raises(ContextFull, match="the observation fills max_context 1000"):
        policy_client.hear(huge)
    assert sum(encoded) < 50_000
