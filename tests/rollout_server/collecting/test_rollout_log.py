import json

import pytest

from rollout_server.collecting.rollout_log import AppendLog

RECORDS = [json.dumps({"n": n, "text": "é" * n}, ensure_ascii=False) for n in range(4)]


def open_log(path):
    seen = []

    def visit(record):
        seen.append(record)
        return True

    return AppendLog(path, visit), seen


def test_cursor_reads(tmp_path):
    log, _ = open_log(tmp_path / "log.jsonl")
    log.append(RECORDS[:1])
    log.append(RECORDS[1:])
    assert log.count == 4
    assert log.read(0, 10) == [record.encode() for record in RECORDS]
    assert log.read(1, 2) == [record.encode() for record in RECORDS[1:3]]
    assert log.read(4, 10) == []


def test_a_kill_at_any_byte_drops_the_torn_record_only(tmp_path):
    """The file cut at every byte there is: whole records stay, the next one goes where the torn one was."""
    whole = "".join(record + "\n" for record in RECORDS).encode()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path = tmp_path / f"{cut}.jsonl"
        path.write_bytes(whole[:cut])
        log, seen = open_log(path)
        there = sum(end <= cut for end in ends)
        assert log.count == there
        assert seen == [json.loads(record) for record in RECORDS[:there]]
        log.append(["{}"])
        assert open_log(path)[1] == [*seen, {}]


def test_a_record_is_cut_off_with_those_it_waits_for(tmp_path):
    """Lines of 1, 2 and 3 records that belong together: what stays after a kill is whole, wherever it was."""
    groups = [[{"of": of, "n": n} for n in range(of)] for of in (1, 2, 3)]
    lines = [json.dumps(record) for group in groups for record in group]
    may_end = {0, 1, 3, 6}
    for written in range(len(lines) + 1):
        path = tmp_path / f"{written}.jsonl"
        path.write_text("".join(line + "\n" for line in lines[:written]))
        log = AppendLog(path, lambda record: record["n"] + 1 == record["of"])
        assert log.count == max(end for end in may_end if end <= written)
        assert path.read_text().splitlines() == lines[: log.count]


def test_zeros_after_a_power_cut_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(RECORDS[0].encode() + b"\n" + b"\0" * 100 + b"\n" + RECORDS[1].encode() + b"\n")
    assert open_log(path)[1] == [json.loads(RECORDS[0])]


def test_record_that_is_refused_counts_as_torn(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"n": 1}\n{"m": 2}\n')

    def visit(record):
        if "n" not in record:
            raise ValueError("no n")
        return True

    assert AppendLog(path, visit).count == 1


def test_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    import os

    log, _ = open_log(tmp_path / "log.jsonl")
    log.append(RECORDS[:2])
    real_write = os.write

    def full(descriptor, data):
        if len(data) > 4:
            return real_write(descriptor, data[:4])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(RECORDS[2:])
    monkeypatch.undo()
    assert log.count == 2
    assert open_log(tmp_path / "log.jsonl")[0].count == 2
    log.append(RECORDS[2:])
    assert open_log(tmp_path / "log.jsonl")[1] == [json.loads(record) for record in RECORDS]
