"""experiments/records.py: what is counted, and that the tables in the documents are those of the committed records."""

import dataclasses

import pytest

from loop_formats.run_files import write_rollouts
from loop_formats.schema import ConfigError
from support.experiment_scripts import FOLDER, check_tables, load_experiment, made_up_evaluation, made_up_record
from support.small_runs import stored_rollout


def test_rollouts_of_dev_are_not_counted(tmp_path):
    records = load_experiment("records")
    rollouts = [stored_rollout("made-up", f"task_{number}", 0, 0, 1.0, 50, number) for number in range(4)]
    write_rollouts(tmp_path / "node/collections", "made-up-i0002", rollouts)
    write_rollouts(tmp_path / "node/collections", "made-up-i0002-dev", rollouts[:1])
    made_up_evaluation(tmp_path / "evaluation", {"held0_1": True, "held1_1": False})
    record = records.Record.of_run("base", 0, 24, None, [tmp_path / "node"], tmp_path / "evaluation")
    assert record.rollouts == 4
    assert record.sampled_tokens == sum(rollout.sampled_tokens for rollout in rollouts)
    file = tmp_path / "records.jsonl"
    record.write(file)
    read = records.read_record(file, "base", 0, 24)
    assert [result.solved for result in read.results] == [True, False]
    assert read == record
    assert records.read_record(file, "base", 1, 24) is None


def test_of_several_lines_the_last_counts_and_a_search_has_its_own(tmp_path):
    records, file = load_experiment("records"), tmp_path / "records.jsonl"
    first, last = (made_up_record("grpo", 0, [], rate=rate) for rate in (1e-3, 2e-3))
    tried = dataclasses.replace(first, searched=True)
    for record in (first, tried, last):
        record.write(file)
    assert records.read_record(file, "grpo", 0, 600).rate == last.rate
    assert records.read_record(file, "grpo", 0, 600, searched=1e-3).searched
    assert records.read_record(file, "grpo", 0, 600, searched=2e-3) is None
    with file.open("a") as lines:
        lines.write('{"name": "grp')  # its writer was killed
    last.write(file)
    assert len(file.read_text().splitlines()) == 4


def test_the_committed_records_are_read():
    records = load_experiment("records")
    kept = records.read_all(FOLDER / "results/tiny_policy.jsonl")
    assert len(kept) == 126
    assert len({record.policy for record in kept.values()}) == 1
    assert sum(record.searched for record in kept.values()) == 59


def test_records_of_different_base_policies_do_not_make_one_table(tmp_path):
    records = load_experiment("records")
    file = tmp_path / "records.jsonl"
    made_up_record("grpo", 0, []).write(file)
    made_up_record("grpo", 1, [], policy="another").write(file)
    assert [one.seed for one in records.read_records(file, ["grpo"], [1], 600)["grpo"]] == [1]
    with pytest.raises(ConfigError, match="began from different policies: grpo, seed 0; grpo, seed 1"):
        records.read_records(file, ["grpo"], [0, 1], 600)


def test_the_tables_in_the_documents_are_those_of_the_records(tmp_path, monkeypatch):
    check_tables("algorithms", tmp_path, monkeypatch)
