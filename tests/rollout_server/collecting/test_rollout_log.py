import errno
import json
import os
import threading

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
    log.append(RECORDS)
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


def test_a_torn_record_is_named_by_its_number(tmp_path, caplog):
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n{}\n{")
    assert open_log(path)[0].count == 2
    assert "record 3 is torn" in caplog.text
    assert "dropping the last 1 bytes" in caplog.text


def test_what_is_damaged_is_on_disk_aside_before_it_leaves_the_log(tmp_path, monkeypatch):
    path, aside, synced, fsync = tmp_path / "log.jsonl", tmp_path / "log.jsonl.damaged", [], os.fsync
    path.write_bytes(b"{}\nbroken\n{}\n")

    def recorded(descriptor):
        synced.append((aside.read_bytes(), path.read_bytes()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    assert open_log(path)[1] == [{}, {}]
    assert synced[0] == (b"broken\n", b"{}\nbroken\n{}\n")


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


@pytest.mark.parametrize("damaged", range(3))
@pytest.mark.parametrize("damage", [b"\0", b"[", b"\xff"])
def test_a_damaged_line_is_set_aside_and_those_after_it_keep_their_places(tmp_path, damaged, damage, caplog):
    path = tmp_path / "log.jsonl"
    lines = [record.encode() for record in RECORDS]
    torn = damage + lines[damaged][1:]
    path.write_bytes(b"".join(line + b"\n" for line in [*lines[:damaged], torn, *lines[damaged + 1 :]]))
    kept = [*lines[:damaged], *lines[damaged + 1 :]]
    for _ in range(2):
        log, seen = open_log(path)
        assert seen == [json.loads(line) for line in kept]
        assert log.count == 4
        assert log.read(damaged + 1, 10) == lines[damaged + 1 :]
        assert [line for line in log.read(0, 10) if line.strip()] == kept
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is damaged in line {damaged + 1}: set aside in {path}.damaged; the others are kept"
    ]
    assert (tmp_path / "log.jsonl.damaged").read_bytes() == torn + b"\n"


def test_zeros_after_a_power_cut_cost_no_other_record(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(RECORDS[0].encode() + b"\n" + b"\0" * 100 + b"\n" + RECORDS[1].encode() + b"\n" + b"\0" * 9)
    log, seen = open_log(path)
    assert seen == [json.loads(record) for record in RECORDS[:2]]
    log.append(["{}"])
    assert open_log(path)[1] == [*seen, {}]


def test_a_damaged_line_takes_along_those_that_are_nothing_without_it(tmp_path):
    """Groups of three lines, of which one is damaged: that group is set aside, the others are kept."""
    lines = [json.dumps({"group": group, "n": n}) for group in range(3) for n in range(3)]

    def open_groups(path):
        kept, expected = [], None

        def visit(record):
            nonlocal expected
            if record["n"] and record != expected:
                raise ValueError("what it goes on from is missing")
            expected = {"group": record["group"], "n": record["n"] + 1}
            kept.append(record["group"])
            return record["n"] == 2

        return AppendLog(path, visit), kept

    for damaged in range(6):
        path = tmp_path / f"{damaged}.jsonl"
        path.write_text("".join(f"{line}\n" for line in [*lines[:damaged], "{", *lines[damaged + 1 :]]))
        open_groups(path)
        log, kept = open_groups(path)
        assert log.count == 9
        assert kept == [group for group in range(3) if group != damaged // 3 for _ in range(3)]
    path.write_text("".join(f"{line}\n" for line in [*lines[:7], "{", lines[8]]))
    assert open_groups(path)[0].count == 6, "the last group is a write that was cut short"


def test_threads_that_append_at_once_do_not_meet(tmp_path, monkeypatch):
    """Both would find the same end of the file; a full disk would then cut off a neighbour's record."""
    log, _ = open_log(tmp_path / "log.jsonl")
    first_writes, second_waits, real_fsync = threading.Event(), threading.Event(), os.fsync

    def fsync(descriptor):
        first_writes.set()
        second_waits.wait(0.2)
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    threads = [threading.Thread(target=log.append, args=(records,)) for records in (RECORDS[:1], RECORDS[1:])]
    threads[0].start()
    assert first_writes.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    monkeypatch.undo()
    assert log.read(0, 10) == [record.encode() for record in RECORDS]

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        log.append(["{}"])
    monkeypatch.undo()
    assert open_log(log.path)[0].count == 4


def test_record_of_another_version_counts_as_torn(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"n": 1}\n{"m": 2}\n{"n": null}\n')
    assert AppendLog(path, lambda record: record["n"] > 0).count == 1


def test_failed_write_leaves_the_file_as_it_was(tmp_path, monkeypatch):
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
