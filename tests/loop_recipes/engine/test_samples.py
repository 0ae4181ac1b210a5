"""Samples: what a stage of a rollout has, and where it is cut."""

import itertools
from dataclasses import replace

import pytest
import torch

from loop_formats.schema import ConfigError
from loop_recipes.config.loop_config import UpdateConfig
from loop_recipes.engine.samples import CreditedSample, Sample, ScoredSample, credited, scored, training_samples
from support.learner_cases import make_samples
from support.rollouts import rollout, turn


def record(token_ids, spans, **changes):
    turns = [turn(start, end, 3 + number, number) for number, (start, end) in enumerate(spans)]
    sampled = [any(start <= place < end for start, end in spans) for place in range(len(token_ids))]
    logprobs = [-0.5 - place if mine else 0.0 for place, mine in enumerate(sampled)]
    return rollout(token_ids, turns, **{"reward": 0.75, "sampler_logprobs": logprobs, **changes}).validate()


def test_a_record_becomes_a_sample():
    sample = Sample.from_rollout(record([5, 6, 7, 8, 9, 10, 11], [(2, 4), (5, 7)]))
    assert sample.token_ids.tolist() == [5, 6, 7, 8, 9, 10, 11]
    assert sample.turn_ids.tolist() == [-1, -1, 0, 0, -1, 1, 1]
    assert sample.sampler_logprobs.tolist() == [-2.5, -3.5, -5.5, -6.5]
    assert sample.policy_versions.tolist() == [3, 3, 4, 4]
    assert (sample.reward, sample.task_id, sample.tokens) == (0.75, "t_1", 7)


def test_an_episode_over_its_budget_is_paid_as_asked():
    ways = [
        UpdateConfig(episode_return=paid, unfinished_return=unfinished)
        for paid, unfinished in itertools.product(("reward", "success"), ("graded", "zero"))
    ]
    for reason, success, expected in (
        ("turn_limit", False, [0.75, 0.0, 0.0, 0.0]),
        ("turn_limit", True, [0.75, 0.0, 1.0, 0.0]),
        ("completed", False, [0.75, 0.75, 0.0, 0.0]),
        ("completed", True, [0.75, 0.75, 1.0, 1.0]),
    ):
        ended = record([5, 6, 7], [(1, 3)], end_reason=reason, success=success)
        ended = replace(ended, turns=[replace(turn, reward=0.25) for turn in ended.turns])
        samples = [Sample.from_rollout(ended, way) for way in ways]
        assert [sample.reward for sample in samples] == expected
        assert [sample.turn_rewards for sample in samples] == [(0.25,), (0.25,), (0.0,), (0.0,)]


def test_the_beginning_of_a_sample_is_that_of_the_record():
    sample = Sample.from_rollout(record([5, 6, 7, 8, 9, 10, 11], [(2, 4), (5, 7)]))
    for length in range(3, 9):
        spans = [(start, min(end, length)) for start, end in [(2, 4), (5, 7)] if start < length]
        expected = Sample.from_rollout(record([5, 6, 7, 8, 9, 10, 11][:length], spans))
        beginning = sample.beginning(length)
        for name in ("token_ids", "mask", "turn_ids", "sampler_logprobs", "policy_versions"):
            assert getattr(beginning, name).tolist() == getattr(expected, name).tolist()
        assert beginning.reward == sample.reward
    with pytest.raises(ValueError, match="no sampled token"):
        sample.beginning(2)


def test_sequences_that_begin_to_be_sampled_later_are_left_out():
    ids, place = [5, 6, 7, 8, 9, 10, 11], {"episode_id": "c/t_1/0.0", "segments": 2}
    first = record(ids, [(2, 4)], **place)
    second = record(ids, [(5, 7)], rollout_id="c/t_1/0.0/1", segment=1, **place)
    kept = {
        length: [
            (s.segment, s.tokens)
            for s in training_samples([first, second], UpdateConfig(max_tokens_per_rollout=length))
        ]
        for length in (4, 6, 9, None)
    }
    assert kept == {4: [(0, 4)], 6: [(0, 6), (1, 6)], 9: [(0, 7), (1, 7)], None: [(0, 7), (1, 7)]}
    late = record(ids, [(5, 7)], rollout_id="c/t_1/0.1")
    learned = training_samples([first, second, late], UpdateConfig(max_tokens_per_rollout=4))
    assert [sample.rollout_id for sample in learned] == [first.rollout_id]
    with pytest.raises(ConfigError, match=r"max_tokens_per_rollout is 2, and none of 2 rollouts"):
        training_samples([first, second], UpdateConfig(max_tokens_per_rollout=2))


def test_samples_without_anything_to_learn_or_predict_from_are_refused():
    (sample,) = make_samples([8])
    with pytest.raises(ValueError, match="no sampled token"):
        replace(sample, mask=torch.zeros(8, dtype=torch.bool))
    with pytest.raises(ValueError, match="first token counts as sampled"):
        replace(sample, mask=torch.ones(8, dtype=torch.bool))


def test_each_stage_keeps_what_the_one_before_has_and_begins_anew_from_any():
    of_episode = [replace(sample, episode_id="episode") for sample in make_samples([12, 20])]
    first, second = credited(of_episode, 0.5, pair="a > b")
    assert type(first) is CreditedSample
    assert (first.advantage, first.pair, first.reward) == (0.5, "a > b", of_episode[0].reward)
    sampled = sum(int(sample.mask.sum()) for sample in of_episode)
    assert first.episode_tokens == second.episode_tokens == sampled
    assert first.episode_turns == second.episode_turns == sum(sample.turns for sample in of_episode)
    old = torch.zeros(int(first.mask.sum()))
    again = scored(scored(first, old), old + 1.0)
    assert type(again) is ScoredSample
    assert torch.equal(again.old_logprobs, old + 1.0)
    assert (again.advantage, again.token_advantages, again.ref_logprobs) == (0.5, None, None)
    assert type(credited([again], 1.0)[0]) is CreditedSample
