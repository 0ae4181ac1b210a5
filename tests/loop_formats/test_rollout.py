"""The record's invariants, of token ids and of text alone."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas
import pytest

from loop_formats.ids import segment_id
from loop_formats.rollout import Rollout, by_episode
from support.rollouts import rollout as made_up
from support.rollouts import turn


def rollout(**changes):
    spoken = {"messages": [{"role": "assistant", "content": "x"}], "sampler_logprobs": [0.0, -0.5, -0.25, 0.0]}
    return replace(made_up([5, 6, 7, 8], [turn(1, 3)], **spoken), **changes)


def text_only(**changes):
    return rollout(**{"token_ids": [], "mask": [], "sampler_logprobs": [], "turns": [turn(0, 0)] * 2, **changes})


@pytest.mark.parametrize("sound", [rollout(), text_only()])
def test_a_sound_record_survives_its_json(sound):
    assert Rollout.from_dict(json.loads(sound.validate().to_json())).validate() == sound


def test_only_text_has_no_token_ids():
    assert text_only().text_only
    assert not rollout().text_only
    assert text_only().sampled_tokens == 0


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (rollout(turns=[]), "no turns"),
        (rollout(turns=[replace(turn(1, 3), message=1)]), "turn 0 is message 1, which is not an assistant message"),
        (rollout(mask=[False, True, True]), "4 token ids, 3 mask entries"),
        (rollout(turns=[turn(0, 0)]), r"turn 0 spans \[0, 0\) after 1 of 4"),
        (rollout(turns=[turn(0, 2)]), r"turn 0 spans \[0, 2\)"),
        (rollout(turns=[turn(1, 2)]), "the mask is not the union"),
        (rollout(sampler_logprobs=[0.0, -9999.0, -0.25, 0.0]), "sampled token 1 has log-prob -9999"),
        (rollout(sampler_logprobs=[0.0, float("nan"), -0.25, 0.0]), "sampled token 1 has log-prob nan"),
        (rollout(sampler_logprobs=[-0.1, -0.5, -0.25, 0.0]), "token 0 was not sampled"),
        *((rollout(token_ids=[5, t, 7, 8]), r"token_ids\[1\] is \S+, and") for t in (8.9, True, -1, "7", None, 10**30)),
        (rollout(sampler_logprobs=[0.0, None, -0.25, 0.0]), "sampler_logprobs holds NoneType beside numbers"),
        (rollout(reward=1.5), r"reward 1.5 outside \[0, 1\]"),
        (rollout(turns=[replace(rollout().turns[0], reward=float("nan"))]), r"turn 0 has reward nan"),
        (text_only(reward=-0.5), r"reward -0.5 outside"),
        (rollout(end_reason="tired"), "end reason 'tired'"),
        (text_only(end_reason="tired"), "end reason 'tired'"),
        (text_only(turns=[]), "no turns"),
        (rollout(segment=1), "sequence 1 of 1 of episode c/t_1/0.0"),
        (rollout(segment=1, segments=2), "sequence 1 of 2 of episode c/t_1/0.0"),
        (rollout(episode_id="c/t_1/0.1"), "sequence 0 of 1 of episode c/t_1/0.1"),
        (text_only(turns=[turn(1, 3)]), r"turn 0 spans \[1, 3\) of no token ids"),
        (text_only(mask=[True]), "no token ids, 1 mask entries, 0 log-probs"),
    ],
)
def test_a_broken_invariant_is_named(broken, message):
    with pytest.raises(ValueError, match=f"rollout c/t_1/0.0: .*{message}"):
        broken.validate()


def test_another_schema_is_refused():
    with pytest.raises(ValueError, match="rollout schema 3 is not 2"):
        Rollout.from_dict(vars(replace(rollout(), schema=3)))


def test_the_sequences_of_an_episode_are_found_together():
    def segment(task, number):
        episode = f"c/{task}/0.0"
        return rollout(
            rollout_id=segment_id(episode, number), episode_id=episode, segment=number, segments=2
        ).validate()

    first, second, other = segment("t_1", 0), segment("t_1", 1), segment("t_2", 0)
    assert by_episode([second, other, first]) == [[first, second], [other]]


PROJECT = Path(__file__).parents[2]
PAGES = [PROJECT / "README.md", PROJECT / "loop_formats/rollout.py", *sorted((PROJECT / "docs").rglob("*.md"))]
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
ONE_LINERS = sorted(set(re.findall(r"read_json\(.*?\)", TEXT)))


@pytest.mark.parametrize("one_liner", ONE_LINERS)
def test_the_documented_line_reads_what_was_written(tmp_path, one_liner):
    ids = ["10_1", "1_01", "1e3", "007", "2026-01-01"]
    written = [rollout(task_id=name, rollout_id=f"c/{name}/0.0", started_at=1.7e9) for name in ids]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(f"{one.to_json()}\n" for one in written))
    call = re.sub(r'\(("[^"]*"|path)', "(path", one_liner)
    table = eval(f"pandas.{call}", {"pandas": pandas, "path": path})
    assert [table[key].tolist() for key in ("task_id", "started_at", "seed")] == [ids, [1.7e9] * 5, [1] * 5]


def test_the_documented_count_of_reasons_tells_them_apart(tmp_path):
    page = (PROJECT / "docs/troubleshooting.md").read_text()
    read, why, count = re.search(r"import pandas\n\nrecords = (.*)\nwhy = (.*)\n(.*)\n```", page).groups()
    broke, path = {"where": "grade", "what": "ValueError"}, tmp_path / "log.jsonl"
    written = [rollout(reward=0.0, success=False, rollout_id=f"c/t_1/{n}.0", broke=broke) for n in range(2)]
    path.write_text("".join(f"{one.to_json()}\n" for one in [*written, rollout(reward=1.0)]))
    records = eval(read.replace('"RUN/node/collections/ID.jsonl"', "path"), {"pandas": pandas, "path": path})
    assert eval(count, {"records": records, "why": eval(why)}).tolist() == [2]
