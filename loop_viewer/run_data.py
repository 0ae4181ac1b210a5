"""Reads a run's files, while it may still be writing: metrics, collections, rollouts, token statistics.

A collection's log is read once and then only from where the last reading ended; of each line only its place and a small
summary stay in memory, so the viewer can show a run of many gigabytes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from agent_environments.agent_turns import agent_turns
from agent_environments.description import Description
from agent_environments.tool_calls import ToolCall, parse_tool_calls
from loop_formats.ids import CollectionName, parse_collection_id
from loop_formats.places import run_meant
from loop_formats.run_files import find_logs, node_address, to_json, write_whole
from loop_formats.run_folder import FOLDERS_ABOVE, TOKEN_STATISTICS, groups_taken, read_description, statistics_files
from loop_formats.turn_values import values_file
from loop_plumbing.grouping import grouped
from loop_viewer.run_head import ListedCollection, run_head
from loop_viewer.run_lines import read_numbers, read_statistics, turn_value
from loop_viewer.run_record import result_of, settings_of, starts_of
from loop_viewer.sequences import thread_of
from loop_viewer.sound_lines import UNREADABLE, damage_of, first_of, sound_lines
from loop_viewer.summaries import KINDS, group_of, kind_of, name_of, read_listed, summary_of, totals

TokenizerReader = Callable[[Path], Any]
"""Reads the tokenizer of a model's folder, one of the package tokenizers; raises ValueError where it holds none."""
MAX_CALLS = 300
READ_AT_ONCE_BYTES = 20_000_000
MAX_NOTE_CHARACTERS = 10_000


@dataclass
class _Indexed:
    """The index of a log: the places of the lines, their summaries, and how far the log has been read.

    ``inode`` is the file's inode at the first read; ``damage`` names the lines that cannot be read.
    """

    path: Path
    inode: int
    offsets: dict[int, int] = field(default_factory=dict)
    """The offset of each line by its number, from 1."""
    summaries: list[dict[str, Any]] = field(default_factory=list)
    read_to: int = 0
    lines: int = 0
    damage: list[str] = field(default_factory=list)
    threads: dict[tuple[int, ...], list[dict[str, Any]]] = field(default_factory=dict)
    """The threads of :meth:`RunData.rollout` by their cursors, cached for a page that asks for each sequence."""

    def is_of(self, file: Path) -> bool:
        """Return whether ``file`` is still this log (perhaps longer), and not a new log of the same name."""
        now = file.stat()
        return (self.path, self.inode) == (file, now.st_ino) and now.st_size >= self.read_to


class RunData:
    """A run's folder, an evaluation's folder, or a single collection's log.

    Args:
        path: the folder or ``*.jsonl`` file.
        model: folder with the policy's tokenizer.json; None: the folder that the files of the run or the node name.
            Without such a folder, tokens appear as numbers.
        within: the runs in a folder to show, if not all of them.
        read_tokenizer: reads the tokenizer; None shows tokens as numbers.

    Raises:
        ValueError: ``path`` holds no run, or ``model`` no tokenizer.
    """

    def __init__(
        self,
        path: Path,
        model: Path | None = None,
        within: Sequence[Path] = (),
        read_tokenizer: TokenizerReader | None = None,
    ) -> None:
        self.path = path.resolve()
        self._within = within or [self.path]
        if not self.path.exists():
            raise ValueError(f"{path} does not exist{run_meant(path)}")
        self._logs: dict[str, _Indexed] = {}
        self._environment = read_description(self.path)
        damage: list[str] = []
        if not self._find_logs() and not read_numbers(self.path, damage):
            nothing = f"{path} holds no run: neither collections/*.jsonl nor metrics.jsonl{run_meant(path)}"
            raise ValueError(first_of(damage) if damage else nothing)
        if path.is_file() and not any(rollout for _, rollout in sound_lines(path, "rollout", read_listed, [])):
            raise ValueError(f"{path} is not a log of rollouts")
        folder = model or self._model_folder()
        known = folder is not None and (model is not None or (folder / "tokenizer.json").is_file())
        self._tokenizer = read_tokenizer(folder) if read_tokenizer and folder is not None and known else None
        self._no_text = "" if known else _no_text(folder)
        self._token_text = lru_cache(maxsize=1 << 16)(self._decode_token)

    @property
    def name(self) -> str:
        return self.path.stem if self.path.is_file() else self.path.name

    def overview(self) -> dict[str, Any]:
        """Return name, metrics and collections; cheap, so that a page can ask again and again.

        ``totals`` of a collection are {"rollouts", "reward", "success"} over its rollouts so far; None if nobody has
        opened the log yet and it is too large to read for three numbers. ``failures`` are its failed attempts, {task:
        {reason: count}}, ``wanted`` the requested rollouts, until it has ``ended``. ``name`` is its name on the page,
        ``kind`` is training, dev, evaluation or continuation. ``whole``: the iteration's metrics cover exactly this
        collection's rollouts. It is false after several shares or rounds, for a stream's groups, or if a run went back
        to a checkpoint and collected the iteration again. At the top level, ``no_text`` says why tokens appear as
        numbers ("" if they do not), and ``node_runs`` whether a running node can continue rollouts. ``head``: see
        :func:`run_head`; ``settings``, ``starts`` and ``result``: see :mod:`loop_viewer.run_record`. ``damage``, of a
        collection and at the top level, names the lines that cannot be read; they are left out. ``shown_once`` is a
        line on collections that several runs share and the page shows once; "" if there are none.

        Raises:
            ValueError: the folder is gone.
        """
        self._find_logs()
        if not self.path.exists():
            raise ValueError(f"{self.path} does not exist any more")
        collections = self._collections(0)
        damage: list[str] = []
        metrics = read_numbers(self.path, damage)
        return {
            "name": self.name,
            "damage": damage,
            "head": run_head(self.path, collections, metrics),
            "settings": settings_of(self.path),
            "starts": starts_of(self.path),
            "result": result_of(self.path),
            "collections": collections,
            "metrics": metrics,
            "no_text": self._no_text,
            "shown_once": self._shared_note,
            "node_runs": any(node_address(root) for root in {log.path.parent.parent for log in self._logs.values()}),
        }

    def head(self) -> dict[str, Any]:
        """Return the result of :func:`run_head` for the run; read only the logs needed for that."""
        self._find_logs()
        metrics = read_numbers(self.path, [])
        return run_head(self.path, self._collections(metrics[-1]["iteration"] if metrics else 0), metrics)

    def _collections(self, done: int) -> list[dict[str, Any]]:
        """Return the collections of :meth:`overview` without those that iterations up to ``done`` trained on."""
        collections = []
        parsed_ids = self._parsed_ids()
        times = Counter(parsed.iteration for parsed in parsed_ids.values() if parsed.is_training)
        names = {name: name_of(parsed) for name, parsed in parsed_ids.items()}
        alike = Counter(names.values())
        for name, log in self._logs.items():
            parsed = parsed_ids[name]
            if parsed.is_training and (parsed.iteration or 0) <= done:
                continue
            in_part, size = parsed.share or parsed.group is not None, log.path.stat().st_size
            if size - log.read_to <= READ_AT_ONCE_BYTES:
                self._read_on(log)
            listed = ListedCollection.of(log.path)
            collections.append(
                {
                    **asdict(listed),
                    "damage": [*log.damage, *listed.damage],
                    "id": name,
                    "name": names[name] if alike[names[name]] == 1 else name,
                    "iteration": parsed.iteration,
                    "whole": parsed.is_training and times[parsed.iteration] == 1 and not in_part,
                    "kind": kind_of(parsed),
                    "bytes": size,
                    "totals": totals(log.summaries),
                }
            )
        return sorted(collections, key=_place_in_list)

    def _parsed_ids(self) -> dict[str, CollectionName]:
        """Return the parts of the collections' ids. The iteration of a stream's group is the one that took it; of a
        group that none took, the next one."""
        taken: dict[str, int] = {}
        with suppress(ValueError):  # with a damaged file all else is shown
            taken = groups_taken(self.path)
        parsed_ids = {name: parse_collection_id(name) for name in self._logs}
        coming = max(taken.values(), default=0) + 1
        for name, parsed in parsed_ids.items():
            if taken and parsed.group is not None:
                parsed_ids[name] = replace(parsed, iteration=taken.get(name, coming))
        return parsed_ids

    def summaries(self, collection: str) -> list[dict[str, Any]]:
        """Return an entry per rollout, in the order of the log; an episode of several sequences has one for each.

        ``advantage`` is the one used in training, if the run kept token statistics. Otherwise it is the leave-one-out
        advantage among the task's rollouts, for a continuation among those from the same turn; None without others.

        Raises:
            KeyError: no such collection.
        """
        log = self._logs[collection]
        self._read_on(log)
        statistics, notes = self._statistics(collection), self.notes()
        groups = grouped((group_of(entry), entry["reward"]) for entry in log.summaries if entry["segment"] == 0)
        result = []
        for entry in log.summaries:
            rewards = groups.get(group_of(entry), [])
            count, own = len(rewards), statistics.get(entry["id"])
            advantage = count / (count - 1) * (entry["reward"] - sum(rewards) / count) if count > 1 else None
            used = {"advantage": own["advantage"], "gap": own["gap"]} if own else {"advantage": advantage, "gap": None}
            result.append({**entry, **used, "note": notes.get(entry["id"], "")})
        return result

    def damage(self, collection: str) -> list[str]:
        """Return a message for each damaged line that was found so far.

        Raises:
            KeyError: no such collection.
        """
        return self._logs[collection].damage

    def rollout(self, collection: str, cursor: int) -> dict[str, Any]:
        """Return the ``cursor``-th rollout (from 1) with the fields that the page shows.

        ``tokens`` is {"texts": distinct texts, "index": [s] into them, "ids": [s]}; ``old_logprobs``, ``ratios``,
        ``clipped``, ``advantages`` and ``entropies`` are per sampled token that was trained on, or None. ``branch_of``
        also has the ``collection`` and ``cursor`` of the continued rollout, if known. ``policy`` is the name of the
        policy that an evaluation scores, else "". ``values`` has the estimated value, or None, for each turn.
        ``thread`` has for each sequence of its episode its ``cursor``, how many messages it has in common with an
        earlier one (``shared``), why it ``begins``, and how many ``turns`` were before it; it
        is empty for an episode of one sequence.

        Raises:
            KeyError: no such collection or rollout.
        """
        path, line = self.stored(collection, cursor)
        record = json.loads(line)
        try:
            return self._page_fields(collection, cursor, record)
        except UNREADABLE as error:
            raise ValueError(damage_of(path, cursor, "rollout", error)) from error

    def _page_fields(self, collection: str, cursor: int, record: dict[str, Any]) -> dict[str, Any]:
        texts: dict[str, int] = {}
        index = [texts.setdefault(self._token_text(token), len(texts)) for token in record["token_ids"]]
        own = self._statistics(collection).get(record["rollout_id"])
        return {
            "collection": collection,
            "cursor": cursor,
            "policy": parse_collection_id(collection).policy,
            **{key: record[key] for key in ("rollout_id", "task_id", "index", "dataset", "reward", "success")},
            **{key: record[key] for key in ("end_reason", "temperature", "seconds", "turns", "seed")},
            **{key: record[key] for key in ("ungradable", "segment", "segments", "messages", "requirements")},
            "broke": record.get("broke"),
            "program": record["extra"].get("harness"),
            "thread": self._thread(collection, cursor, record),
            "branch_of": self._origin(record["branch_of"]),
            "values": self._turn_values(collection, record),
            "calls": _calls(record, self._environment),
            "tokens": {"texts": list(texts), "index": index, "ids": record["token_ids"]},
            "mask": [int(sampled) for sampled in record["mask"]],
            "logprobs": [round(value, 5) for value in record["sampler_logprobs"]],
            **{key: own and own[key] for key in ("old_logprobs", "ratios", "clipped", "advantages", "entropies")},
        }

    def log(self, collection: str) -> Path:
        """Return the file of a collection.

        Raises:
            KeyError: no such collection.
        """
        self._find_logs()
        return self._logs[collection].path

    def stored(self, collection: str, cursor: int) -> tuple[Path, bytes]:
        """Return the log that holds the ``cursor``-th rollout, and the rollout's line.

        Raises:
            KeyError: no such collection or rollout.
        """
        log = self._logs[collection]
        self._read_on(log)
        if cursor not in log.offsets:
            raise KeyError(f"no rollout {cursor} in {collection}")
        with log.path.open("rb") as file:
            file.seek(log.offsets[cursor])
            return log.path, file.readline()

    def notes(self) -> dict[str, str]:
        """Return readers' notes on rollouts, by rollout id; values of their file that are not text are left out."""
        try:
            stored = json.loads(self._notes_file.read_text(encoding="utf-8")) if self._notes_file.is_file() else {}
        except (OSError, ValueError):
            return {}
        pairs = stored.items() if isinstance(stored, dict) else ()
        return {key: value for key, value in pairs if isinstance(value, str)}

    def write_note(self, collection: str, cursor: int, text: str) -> None:
        """Store a note on a rollout in ``notes.json`` of the run's folder; an empty text removes the note.

        Raises:
            KeyError: no such collection or rollout.
            ValueError: the note is too long, or the file cannot be written.
        """
        if len(text) > MAX_NOTE_CHARACTERS:
            raise ValueError(f"the note has {len(text)} characters; it may have {MAX_NOTE_CHARACTERS}")
        rollout = json.loads(self.stored(collection, cursor)[1])["rollout_id"]
        notes = {**self.notes(), rollout: text.strip()}
        try:
            write_whole(
                self._notes_file, to_json({key: value for key, value in notes.items() if value}, indent=1) + "\n"
            )
        except OSError as error:
            raise ValueError(f"{self._notes_file} cannot be written: {error.strerror}") from error

    @property
    def _notes_file(self) -> Path:
        return self.path.with_suffix(".notes.json") if self.path.is_file() else self.path / "notes.json"

    def search(self, collection: str, text: str) -> list[int]:
        """Return cursors of rollouts with ``text`` in an id, the note or a message; upper and lower case are equal.

        Raises:
            KeyError: no such collection.
        """
        log = self._logs[collection]
        self._read_on(log)
        wanted, notes = text.casefold(), self.notes()
        cursors = []
        for line, rollout in sound_lines(log.path, "rollout", read_listed, log.damage):
            if line.number > log.lines:
                break
            if rollout is None:
                continue
            texts = [f"{message.content}\n{message.reasoning}" for message in rollout.messages]
            texts += [rollout.task_id, rollout.rollout_id, notes.get(rollout.rollout_id, "")]
            if any(wanted in text.casefold() for text in texts):
                cursors.append(line.number)
        return cursors

    def _find_logs(self) -> bool:
        """Find the run's logs; forget logs that are gone or were begun anew. Return whether there are any logs."""
        files: dict[str, Path] = {}
        duplicates = []
        for file in chain.from_iterable(map(find_logs, self._within)):
            if not files.setdefault(file.stem, file).samefile(file):
                duplicates.append(file.stem)
        self._shared_note = _shared_note(duplicates)
        known = {name: log for name, log in self._logs.items() if name in files and log.is_of(files[name])}
        self._logs = {name: known.get(name) or _Indexed(file, file.stat().st_ino) for name, file in files.items()}
        return bool(self._logs)

    def _read_on(self, log: _Indexed) -> None:
        for line, rollout in sound_lines(log.path, "rollout", read_listed, log.damage, log.read_to, log.lines + 1):
            log.read_to, log.lines = line.end, line.number
            if rollout is not None:
                log.summaries.append(summary_of(rollout, line.number))
                log.offsets[line.number] = line.start

    def _thread(self, collection: str, cursor: int, record: dict[str, Any]) -> list[dict[str, Any]]:
        """Return those sequences of the episode of ``record`` that are in the log, in order."""
        if record["segments"] == 1:
            return []
        log, first = self._logs[collection], cursor - record["segment"]
        cursors = tuple(each for each in log.offsets if each in range(first, first + record["segments"]))
        if cursors not in log.threads:
            records = ((cursor, json.loads(self.stored(collection, cursor)[1])) for cursor in cursors)
            log.threads[cursors] = thread_of(records)
        return log.threads[cursors]

    def _origin(self, branch_of: dict[str, Any] | None) -> dict[str, Any] | None:
        """Return the rollout and the turn that a rollout continues, and the continued rollout's place in the logs if it
        is there."""
        if branch_of is None:
            return None
        collection = branch_of["rollout_id"].partition("/")[0]
        log = self._logs.get(collection)
        if log is not None:
            self._read_on(log)
        entries = log.summaries if log is not None else []
        cursor = next((entry["cursor"] for entry in entries if entry["id"] == branch_of["rollout_id"]), None)
        return {**branch_of, "collection": collection, "cursor": cursor}

    def _turn_values(self, collection: str, record: dict[str, Any]) -> list[dict[str, Any] | None] | None:
        file = values_file(self.path, collection)
        read = sound_lines(file, "turn's value", turn_value, self._logs[collection].damage) if file.is_file() else ()
        values = (value for _, value in read if value is not None)
        known = {value.turn: asdict(value) for value in values if value.rollout_id == record["rollout_id"]}
        before = (record["branch_of"] or {"turns": 0})["turns"]
        return [known.get(before + place) for place in range(len(record["turns"]))] if known else None

    def _statistics(self, collection: str) -> dict[str, dict[str, Any]]:
        files = statistics_files(self.path / TOKEN_STATISTICS, collection)
        stamps = tuple((file, file.stat().st_mtime_ns) for file in files)
        log = self._logs[collection]
        statistics, damage = read_statistics(stamps, log.path) if stamps else ({}, [])
        log.damage += [line for line in damage if line not in log.damage]
        return statistics

    def _model_folder(self) -> Path | None:
        """Return the model's folder that the nearest ``rollout_node.yaml`` above the node's folder names."""
        for folder in (self.path, self.path / "evaluation", *self.path.parents[:FOLDERS_ABOVE]):
            if (file := folder / "rollout_node.yaml").is_file():
                try:  # as data: an interpolation of a stranger's would reveal the reader's variables
                    return Path(yaml.safe_load(file.read_text(encoding="utf-8"))["model"]["path"])
                except (yaml.YAMLError, OSError, LookupError, TypeError, ValueError) as error:
                    raise ValueError(f"{file} is damaged; remove it, and give --model") from error
        return None

    def _decode_token(self, token: int) -> str:
        if self._tokenizer is None:
            return f"‹{token}›"
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _place_in_list(item: Mapping[str, Any]) -> tuple[int, int, float, str]:
    """Return the key that sorts a collection in the list; evaluations stand in the order in which they began."""
    began = item["began"] if item["kind"] == "evaluation" else 0.0
    return KINDS.index(item["kind"]), item["iteration"] or 0, began, item["id"]


def _calls(record: dict[str, Any], environment: Description) -> list[str]:
    """Return the names of an agent's calls, in order."""
    turns = record["turns"]
    try:
        own = agent_turns(record["messages"], [turn["message"] for turn in turns if not turn.get("summary")])
        # A program's environment does not describe its calls; those of tools can be read all the same.
        read = [call.name for turn in own for call in parse_tool_calls(turn.text) if isinstance(call, ToolCall)]
        return (environment.calls(record["task_id"], record["messages"], own) or read)[:MAX_CALLS]
    except ValueError:
        return []


def _shared_note(collections: Sequence[str]) -> str:
    """Return a line on the collections that several runs share; the page shows only the first copy."""
    if not collections:
        return ""
    count = len(set(collections))
    many = f"{count} collections were" if count > 1 else "1 collection was"
    return f"{many} asked for by the same request in several runs, such as {collections[0]}: of each the first is shown"


def _no_text(model: Path | None) -> str:
    """Return the reason why tokens are shown as numbers."""
    why = "no rollout_node.yaml here names the model" if model is None else f"{model} holds no tokenizer.json any more"
    return f"tokens are shown as numbers: {why}; give --model FOLDER"
