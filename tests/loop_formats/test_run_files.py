import errno
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from loop_formats import run_files
from loop_formats.run_files import (
    WriteFailed,
    adapter_digest,
    append_to,
    bring_back,
    check_sums,
    find_logs,
    folders_in,
    in_order,
    log_path,
    meta_path,
    newest_adapter,
    read_lines,
    read_rollouts,
    to_json,
    whole_file,
    whole_folder,
    whole_lines,
    write_sums,
    write_whole,
    writing,
)
from rollout_server.collecting.rollout_log import AppendLog
from support.random_policy import write_adapter
from support.rollouts import rollout, turn
from support.texts import texts_beside

TABLES = texts_beside(__file__)

ROLLOUT = rollout([5, 6], [turn(1, 2)], collection_id="a", reward=1.0, success=True)
RECORDS = [{"n": n, "text": "é" * n} for n in range(3)]
WHOLE = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS).encode()


def test_only_the_logs_of_rollouts_are_found_wherever_a_runs_node_wrote_them(tmp_path):
    folder = tmp_path / "node" / "collections"
    folder.mkdir(parents=True)
    for name in ("b", "a"):
        log_path(folder, name).touch()
        meta_path(folder, name).touch()
    (tmp_path / "metrics.jsonl").touch()
    assert find_logs(tmp_path) == [folder / "a.jsonl", folder / "b.jsonl"]
    assert find_logs(folder / "b.jsonl") == [folder / "b.jsonl"]
    assert find_logs(folder / "b.meta.jsonl") == []


def test_a_file_cut_at_any_byte_gives_its_whole_lines_and_is_read_on_from_there(tmp_path):
    ends = [index + 1 for index, byte in enumerate(WHOLE) if byte == ord("\n")]
    path = tmp_path / "log.jsonl"
    for cut in range(len(WHOLE) + 1):
        path.write_bytes(WHOLE[:cut])
        assert [line.record for line in read_lines(path)] == RECORDS[: sum(end <= cut for end in ends)]
        lines = list(whole_lines(path))
        path.write_bytes(WHOLE)
        rest = whole_lines(path, lines[-1].end, lines[-1].number + 1) if lines else whole_lines(path)
        assert [json.loads(line.text) for line in [*lines, *rest]] == RECORDS
    for line in lines:
        assert WHOLE[line.start : line.end] == line.text


@pytest.mark.parametrize("damage", [b"\0\0\0", b"[1]", b'{"n": ', b"[" * 100_000])
def test_a_whole_line_that_is_no_object_is_named(tmp_path, damage):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n' + damage + b'\n{"n": 2}\n')
    lines = read_lines(path)
    assert next(lines).record == {"n": 1}
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}:2 is not a JSON object"):
        next(lines)


@pytest.mark.parametrize("blank", [b"", b"   "])
def test_a_blank_line_counts_and_is_left_out(tmp_path, blank):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"n": 1}\n' + blank + b'\n{"n": 2}\n')
    assert [(line.number, line.record) for line in read_lines(path)] == [(1, {"n": 1}), (3, {"n": 2})]
    assert [line.start for line in whole_lines(path)] == [0, 10 + len(blank)]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"reward": None}, "a field is of another type: "),
        ({"payment": 1.0}, "not a rollout of schema 2"),
        ({"messages": {"a": 1}}, "a field is of another type: 0"),
        ({"branch_of": []}, "a field is of another type: "),
    ],
)
def test_a_line_that_is_no_rollout_is_named(tmp_path, damage, message):
    log = tmp_path / "a.jsonl"
    log.write_text('{"tampered": null, ' + ROLLOUT.to_json()[1:] + "\n")  # an older log
    assert read_rollouts(log) == [ROLLOUT]
    with log.open("a") as file:
        file.write(json.dumps(ROLLOUT.to_dict() | damage) + "\n")
    with pytest.raises(ValueError, match=rf"^{re.escape(str(log))}:2: .*{message}"):
        read_rollouts(log)


@pytest.mark.parametrize("before", [None, "", "a\n", "a\nb", "b", "b" * 100_000])
def test_what_is_written_at_the_end_never_follows_a_torn_line(tmp_path, before):
    path = tmp_path / "log.jsonl"
    if before is not None:
        path.write_text(before)
    with append_to(path) as file:
        file.write("c\n")
    assert path.read_text() == ("a\nc\n" if before is not None and before.startswith("a") else "c\n")


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_a_folder_are_for_whoever_may_read_it(tmp_path, mask, mode):
    before = os.umask(mask)
    try:
        with whole_folder(tmp_path / "adapter") as partial:
            (partial / "weights").touch(0o600)  # as safetensors makes its files
    finally:
        os.umask(before)
    assert (tmp_path / "adapter/weights").stat().st_mode & 0o777 == mode


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = write_whole(tmp_path / "report.md", "old")

    def fail():
        with whole_file(path) as partial:
            partial.write_text("half of the n")
            assert path.read_text() == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.md", "old")]
    write_whole(path, "new")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("report.md", "new")]


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    with whole_file(tmp_path / "a") as first, whole_file(tmp_path / "a") as second:
        first.write_text("first")
        second.write_text("second")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["first"], "it was renamed last"


def test_a_folder_takes_the_place_of_an_older_one_and_of_what_a_crash_left(tmp_path):
    folder = tmp_path / "policy-v0001"
    (tmp_path / ".policy-v0001.partial").mkdir()
    (tmp_path / ".policy-v0001.partial" / "half").touch()
    for text in ("old", "new"):
        with whole_folder(folder) as partial:
            (partial / text).touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["policy-v0001", "policy-v0001/new"]

    def fail():
        with whole_folder(folder):
            raise OSError(28, os.strerror(28))

    with pytest.raises(OSError, match="No space left"):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["policy-v0001"]
    assert [path.name for path in folder.iterdir()] == ["new"]


class Killed(BaseException):
    """Stands in for the process's sudden death."""


@pytest.fixture(params=["exchange", "no exchange"])
def exchange(request, monkeypatch):
    """Whether the file system can swap two names."""
    if request.param == "no exchange":
        monkeypatch.setattr("loop_formats.run_files._exchange", lambda one, other: False)


@pytest.mark.usefixtures("exchange")
def test_a_folder_that_is_replaced_is_never_gone_whatever_the_process_dies_at(tmp_path, monkeypatch):
    """Killed in place of each rename and each removal in turn; from then on it does nothing, as the dead do."""

    def write(text, die_at):
        calls = []

        def dying(function):
            def call(*args, **kwargs):
                calls.append(function)
                if len(calls) >= die_at:
                    raise Killed
                return function(*args, **kwargs)

            return call

        with monkeypatch.context() as patches:
            patches.setattr(type(tmp_path), "rename", dying(type(tmp_path).rename))
            patches.setattr(shutil, "rmtree", dying(shutil.rmtree))
            patches.setattr("loop_formats.run_files._exchange", dying(run_files._exchange))
            with whole_folder(tmp_path / "iteration_0001") as partial:
                (partial / "text").write_text(text)

    deaths = 0
    for die_at in range(1, 12):
        shutil.rmtree(tmp_path / "iteration_0001", ignore_errors=True)
        write("old", die_at=99)
        try:
            write("new", die_at)
        except Killed:
            deaths += 1
        found = folders_in(tmp_path)
        assert list(found) == ["iteration_0001"], die_at
        assert (found["iteration_0001"] / "text").read_text() in ("old", "new")
        bring_back(tmp_path)
        assert (tmp_path / "iteration_0001/text").read_text() in ("old", "new")
    assert deaths >= 4
    write("newest", die_at=99)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration_0001"]


def test_numbers_in_names_are_sorted_as_numbers(tmp_path):
    names = [f"policy-v{version:04d}" for version in (9999, 10000, 10001, 2)]
    for name in names:
        write_adapter(tmp_path / "policies" / name, seed=0)
    in_numbers = ["policy-v0002", "policy-v9999", "policy-v10000", "policy-v10001"]
    assert [path.name for path in in_order(path for path in (tmp_path / "policies").iterdir())] == in_numbers
    assert newest_adapter(tmp_path) == tmp_path / "policies/policy-v10001"
    (tmp_path / "policies/policy-v10001/adapter_config.json").unlink()
    assert newest_adapter(tmp_path) == tmp_path / "policies/policy-v10000"
    odd = [Path(name) for name in ("", "²", "7", "a", "a1", "a01", "a1b", "1a", "01/b", "1/a")]
    assert in_order(odd) == in_order(reversed(odd))


def test_a_flipped_byte_is_found(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(name.encode() * 1000)
    check_sums(tmp_path)  # as earlier versions left it
    write_sums(tmp_path)
    check_sums(tmp_path)
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True, capture_output=True)
    for name in ("a", "b", "SHA256SUMS"):
        whole = (tmp_path / name).read_bytes()
        for place in (0, 50, len(whole) - 1) if name != "SHA256SUMS" else (0, 50):
            (tmp_path / name).write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            with pytest.raises(ValueError, match="is not as it was written"):
                check_sums(tmp_path)
        (tmp_path / name).write_bytes(whole)
    (tmp_path / "b").unlink()
    with pytest.raises(FileNotFoundError):
        check_sums(tmp_path)


def test_json_has_no_number_that_is_not_one():
    text = to_json({"a": [math.inf, -math.inf, 1.5, {"b": (math.nan, 1)}], "c": "Infinity", "d": True})
    read = {"a": [None, None, 1.5, {"b": [None, 1]}], "c": "Infinity", "d": True}
    assert json.loads(text, parse_constant=pytest.fail) == read


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "No space left on device"),
        (SafetensorError("I/O error: No space left on device"), "I/O error: No space left on device"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "Disk quota exceeded"),
        (OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)), "Operation not supported"),
    ],
)
def test_what_cannot_be_written_is_one_line(tmp_path, error, words):
    cure = "have it take files, or move them" if "supported" in words else "free some space there"
    line = f"^cannot write {tmp_path}: {words}; {cure} and start .* is lost$"
    with pytest.raises(WriteFailed, match=line), writing(tmp_path):
        raise error
    with pytest.raises(KeyError), writing(tmp_path):
        raise KeyError


def test_what_is_written_is_utf_8_whatever_the_locale(tmp_path):
    """In a process whose locale knows ASCII only."""
    program = (
        "import sys; from pathlib import Path; from loop_formats.run_files import append_to, write_whole; "
        "path = Path(sys.argv[1]); write_whole(path, chr(233) + chr(10)); append_to(path).write(chr(252) + chr(10))"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", program, tmp_path / "a"], env=environment, check=True)
    assert (tmp_path / "a").read_text(encoding="utf-8") == "é\nü\n"


def _linked(run, layout):
    """A run whose log lies behind a link, in one of ten ways; returns how many logs there are."""
    elsewhere = run.parent / "elsewhere"
    collections = elsewhere / "node/collections"
    collections.mkdir(parents=True)
    (collections / "a.jsonl").write_text("{}\n")
    run.mkdir()
    match layout:
        case "the node's folder":
            (run / "node").symlink_to(elsewhere / "node")
        case "its collections":
            (run / "node").mkdir()
            (run / "node/collections").symlink_to(collections)
        case "a log":
            (run / "node/collections").mkdir(parents=True)
            (run / "node/collections/a.jsonl").symlink_to(collections / "a.jsonl")
        case "the run":
            run.rmdir()
            run.symlink_to(elsewhere)
        case "an evaluation's node":
            (run / "evaluation").mkdir()
            (run / "evaluation/node").symlink_to("../../elsewhere/node")
        case "a link to a link":
            (run.parent / "between").symlink_to(elsewhere / "node")
            (run / "node").symlink_to(run.parent / "between")
        case "only one of two nodes":
            (run / "node-1").symlink_to(elsewhere / "node")
            (run / "node-2/collections").mkdir(parents=True)
            (run / "node-2/collections/b.jsonl").write_text("{}\n")
            return 2
        case "two names of one folder":
            (run / "node").symlink_to(elsewhere / "node")
            (run / "node-again").symlink_to(elsewhere / "node")
        case "a circle":
            (run / "node").symlink_to(elsewhere / "node")
            (elsewhere / "node/up").symlink_to(run)
        case "a link to nowhere beside it":
            (run / "node").symlink_to(elsewhere / "node")
            (run / "gone").symlink_to(run / "nowhere")
    return 1


LAYOUTS = TABLES["layouts"]


@pytest.mark.fault("logs behind a link")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logs_are_found_behind_links(tmp_path, layout):
    count = _linked(tmp_path / "run", layout)
    logs = find_logs(tmp_path / "run")
    assert len(logs) == count
    assert all(log.is_relative_to(tmp_path / "run") for log in logs)


BROKEN = [b"", b"\0" * 40, b"{", b"[]", b"null", b'{"url": ', b"{}", b'{"url": 3', b"\xff\xfe", b'"http://a"']


@pytest.mark.fault("small files that a power cut emptied")
@pytest.mark.parametrize("content", BROKEN)
def test_an_address_that_cannot_be_read_is_none(tmp_path, content):
    (tmp_path / "node.json").write_bytes(content)
    assert run_files.node_address(tmp_path) is None
    assert run_files.node_address(tmp_path, pid=1) is None


@pytest.mark.fault("small files that a power cut emptied")
def test_a_file_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done = []
    replace, fsync = Path.replace, os.fsync
    monkeypatch.setattr(Path, "replace", lambda self, target: (done.append("named"), replace(self, target))[1])
    monkeypatch.setattr(os, "fsync", lambda number: (done.append("synced"), fsync(number))[1])
    write_whole(tmp_path / "run.json", "{}")
    assert done == ["synced", "named", "synced"]


@pytest.mark.fault("a folder that cannot be removed")
def test_a_link_in_the_place_of_a_folder_gives_way_and_leads_to_what_it_did(tmp_path):
    (tmp_path / "archive").mkdir()
    (tmp_path / "archive/kept").touch()
    (tmp_path / "one").symlink_to("archive")
    for text in ("a", "b"):
        with whole_folder(tmp_path / "one") as partial:
            (partial / "file").write_text(text)
    assert (tmp_path / "one/file").read_text() == "b"
    assert not (tmp_path / "one").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["archive", "one"]
    assert (tmp_path / "archive/kept").exists()


REFUSALS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EBADF)


def _new_folder(path):
    with whole_folder(path / "iteration_0001") as partial:
        (partial / "weights").write_text("new")
    return path / "iteration_0001/weights"


def _replaced_folder(path):
    with whole_folder(path / "iteration_0001") as partial:
        (partial / "weights").write_text("old")
    return _new_folder(path)


def _log(path):
    AppendLog(path / "c.jsonl", lambda record: True).append(["{}"])
    assert AppendLog(path / "c.jsonl", lambda record: True).read(0, 9) == [b"{}"]
    (path / "c.jsonl").write_text("new")
    return path / "c.jsonl"


def _copy(path):
    _new_folder(path / "states")
    run_files.copy_folder(path / "states", path / "copied")
    return path / "copied/iteration_0001/weights"


WRITERS = {
    "copy": _copy,
    "file": lambda path: write_whole(path / "run.json", "new"),
    "folder": _new_folder,
    "replaced folder": _replaced_folder,
    "log": _log,
}


@pytest.mark.fault("on SMB, FUSE or 9p no checkpoint is written, because a call is refused that can be done without")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "call", ["fsync", "fsync of a folder", "open of a folder", "chmod", "renameat2", "no renameat2"]
)
def test_a_file_system_that_lacks_a_call_is_written_to(tmp_path, monkeypatch, caplog, writer, call):
    fsync, opened, number = os.fsync, os.open, errno.EINVAL

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    def fsync_of_files(descriptor):
        return refuse() if stat.S_ISDIR(os.fstat(descriptor).st_mode) else fsync(descriptor)

    def open_files(path, *arguments, **options):
        return refuse() if os.path.isdir(path) else opened(path, *arguments, **options)

    library = SimpleNamespace() if call == "no renameat2" else SimpleNamespace(renameat2=lambda *_: -1)
    run_files._warn_once.cache_clear()
    for number in REFUSALS:
        (folder := tmp_path / str(number)).mkdir()
        with monkeypatch.context() as patches:
            match call:
                case "fsync":
                    patches.setattr(os, "fsync", refuse)
                case "fsync of a folder":
                    patches.setattr(os, "fsync", fsync_of_files)
                case "open of a folder":
                    patches.setattr(os, "open", open_files)
                case "chmod":
                    patches.setattr(os, "chmod", refuse)
                case _:
                    patches.setattr(run_files.ctypes, "CDLL", lambda *_, **__: library)
            assert WRITERS[writer](folder).read_text() == "new"
    assert len(caplog.messages) == len(set(caplog.messages))  # of many files, one warning
    assert call != "fsync" or len(caplog.messages) == len({os.strerror(number) for number in REFUSALS})


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_or_broken_is_no_such_file_system(tmp_path, monkeypatch, writer, number):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        WRITERS[writer](tmp_path)


@pytest.mark.fault("the same file, model, adapter or run in another place is taken for another")
@pytest.mark.parametrize(("changed", "same"), TABLES["an_adapter_is_known_by_what_it_does_wherever_its_base_lies"])
def test_an_adapter_is_known_by_what_it_does_wherever_its_base_lies(tmp_path, changed, same):
    settings = {"base_model_name_or_path": "/models/a", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "o"]}
    digests = []
    for written in (settings, dict(reversed((settings | changed).items()))):
        (tmp_path / "adapter_config.json").write_text(json.dumps(written, indent=len(digests)))
        (tmp_path / "adapter_model.safetensors").write_bytes(b"0123")
        digests.append(adapter_digest(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0124")
    assert (digests[0] == digests[1]) is same
    assert adapter_digest(tmp_path) not in digests
