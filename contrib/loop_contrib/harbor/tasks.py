"""Folders of tasks in Harbor's form: ``instruction.md``, ``task.toml``, ``environment/``, ``tests/``, ``solution/``."""

from __future__ import annotations

import hashlib
import re
import shlex
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from agent_environments.tools.tasks import SPLIT, TaskTable
from loop_plumbing.breakage import raised_as

MEMORY_MB = 2048
CPUS = 1
AGENT_S = VERIFIER_S = BUILD_S = 600.0
"""Limits of a task whose file gives none."""
_NOT_YET = {
    "": ("steps",),
    "environment": ("mcp_servers", "healthcheck", "gpus", "skills_dir", "allowed_hosts"),
    "agent": ("network_mode", "allowed_hosts"),
    "verifier": ("environment", "collect", "network_mode", "allowed_hosts"),
}
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_OURS = tuple(map(PurePosixPath, ("/tests", "/logs", "/solution", "/proc", "/sys", "/dev")))
_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}


@dataclass(frozen=True)
class HarborTask:
    """A task in a folder.

    Attributes:
        image: the image that ``docker_image`` names; None if ``environment/Dockerfile`` is built.
        variables: variables of all its containers; ``verifier_variables``, ``solution_variables`` are added for these.
        artifacts: paths in the agent's container that are graded; empty means the working folder.
        agent_s: seconds for all commands of an episode; ``verifier_s`` is for the tests, ``build_s`` for the image.
    """

    id: str
    folder: Path
    instruction: str
    image: str | None
    network: bool
    memory_mb: int
    cpus: float
    workdir: str | None
    user: str | None
    verifier_user: str | None
    variables: Mapping[str, str]
    verifier_variables: Mapping[str, str]
    solution_variables: Mapping[str, str]
    artifacts: tuple[str, ...]
    agent_s: float
    verifier_s: float
    build_s: float

    def digest(self, subfolder: str = "") -> str:
        """Return a digest of the folder or a subfolder (16 digits), of the names, rights and contents of all files."""
        digest = hashlib.sha256()
        top = self.folder / subfolder
        for file in sorted(path for path in top.rglob("*") if path.is_file()):
            mode = file.stat().st_mode & 0o777
            digest.update(f"{file.relative_to(top)}\0{mode}\0{file.stat().st_size}\0".encode() + file.read_bytes())
        return digest.hexdigest()[:16]

    def solution(self) -> list[str]:
        """Return the commands of a shell that write the files of ``solution/`` and run its ``solve.sh``.

        Raises:
            FileNotFoundError: the task has no solution.
            UnicodeDecodeError: a file is not text.
        """
        if not (self.folder / "solution" / "solve.sh").is_file():
            raise FileNotFoundError("it has no solution/solve.sh")
        commands = []
        for file in sorted(path for path in (self.folder / "solution").rglob("*") if path.is_file()):
            place = PurePosixPath("/solution") / file.relative_to(self.folder / "solution")
            text, to = file.read_text(), shlex.quote(str(place))
            commands.append(
                f"mkdir -p {shlex.quote(str(place.parent))}\ncat > {to} <<'END_OF_FILE'\n{text.rstrip()}\nEND_OF_FILE"
            )
        variables = "".join(f"{name}={shlex.quote(value)} " for name, value in self.solution_variables.items())
        return [*commands, f"chmod +x /solution/solve.sh\n{variables}/solution/solve.sh"]


def read_folder(source: str | Mapping[str, str], variables: Mapping[str, str]) -> TaskTable:
    """Read the tasks of a folder, which is a task or holds tasks, or of one such folder for each split.

    Args:
        variables: the values of ``${NAME}`` in the tasks' files; the process environment is not read.

    Raises:
        ValueError: there is no such folder, or a task cannot be played; the message names the file and the key.
    """
    splits = source if isinstance(source, Mapping) else {SPLIT: source}
    by_split = {split: [read_task(folder, variables) for folder in _folders(top)] for split, top in splits.items()}
    return TaskTable({split: [{"id": task.id, "task": task} for task in tasks] for split, tasks in by_split.items()})


def _folders(source: object) -> list[Path]:
    top = Path(str(source)).expanduser()
    if not top.is_dir():
        raise ValueError(f"tasks: there is no folder {top}")
    folders = [top] if (top / "task.toml").is_file() else sorted(file.parent for file in top.glob("*/task.toml"))
    if not folders:
        raise ValueError(f"tasks: neither {top} nor a folder in it has a task.toml")
    return folders


def read_task(folder: Path, variables: Mapping[str, str]) -> HarborTask:
    """Read a task; see :func:`read_folder`."""
    file = folder / "task.toml"
    with raised_as(ValueError, f"{file}: "):
        config = tomllib.loads(file.read_text())
        for key in ("agent", "verifier", "environment", "solution"):
            if not isinstance(config.setdefault(key, {}), dict):
                raise ValueError(f"{key} must be a table")
            if not isinstance(config[key].get("env", {}), dict):
                raise ValueError(f"{key}.env must be a table")
        if not isinstance(config.setdefault("artifacts", []), list):
            raise ValueError("artifacts must be a list of paths")
        _refuse(config, folder)
        environment, agent, verifier = config["environment"], config["agent"], config["verifier"]
        mode = environment.get("network_mode", "public" if environment.get("allow_internet", True) else "no-network")
        if mode not in ("public", "no-network"):
            raise ValueError(f"environment.network_mode {mode!r} is not played yet: public or no-network")
        image = environment.get("docker_image")
        if image is None and not (folder / "environment" / "Dockerfile").is_file():
            raise ValueError("there is neither environment/Dockerfile nor environment.docker_image")
        return HarborTask(
            id=folder.resolve().name,
            folder=folder.resolve(),
            instruction=(folder / "instruction.md").read_text().strip(),
            image=image,
            network=mode == "public",
            memory_mb=_megabytes(environment, "memory", MEMORY_MB),
            cpus=_number(environment, "cpus", CPUS),
            workdir=environment.get("workdir"),
            user=_user(agent),
            verifier_user=_user(verifier),
            variables=_resolved("environment", environment, variables),
            verifier_variables=_resolved("verifier", verifier, variables),
            solution_variables=_resolved("solution", config["solution"], variables),
            artifacts=tuple(map(check_artifact, config["artifacts"])),
            agent_s=_number(agent, "timeout_sec", AGENT_S),
            verifier_s=_number(verifier, "timeout_sec", VERIFIER_S),
            build_s=_number(environment, "build_timeout_sec", BUILD_S),
        )


def _refuse(config: Mapping[str, Any], folder: Path) -> None:
    for section, names in _NOT_YET.items():
        if unsupported := [name for name in names if (config[section] if section else config).get(name)]:
            key = ".".join(filter(None, [section, unsupported[0]]))
            raise ValueError(f"{key} is not played yet: leave it out, or leave the task out")
    if config["environment"].get("os", "linux") != "linux":
        raise ValueError(f"environment.os {config['environment']['os']!r} is not played: linux")
    if any((folder / "environment").glob("docker-compose.y*ml")):
        raise ValueError("environment/docker-compose.yaml is not played yet: a task has one container")
    for name in ("instruction.md", "tests/test.sh"):
        if not (folder / name).is_file():
            raise ValueError(f"there is no {name} beside it")


def check_artifact(path: object) -> str:
    """Return the path of an artifact that is graded.

    Raises:
        ValueError: the path is relative, or overlaps a folder of the grader's container, such as ``/tests``.
    """
    place = PurePosixPath(str(path))
    if not place.is_absolute() or ".." in place.parts:
        raise ValueError(f"artifacts: {path!r} must be an absolute path")
    if any(place in (own, *own.parents) or own in place.parents for own in _OURS):
        raise ValueError(f"artifacts: {place} holds what is not the agent's: name its folder, such as /app")
    return str(place)


def _resolved(section: str, table: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, str]:
    def value(match: re.Match[str]) -> str:
        name, otherwise = match.groups()
        if name not in variables and otherwise is None:
            raise ValueError(
                f"{section}.env asks for the variable {name}: give it in environment.variables of the config"
            )
        return str(variables.get(name, otherwise))

    return {name: _VARIABLE.sub(value, str(text)) for name, text in table.get("env", {}).items()}


def _user(table: Mapping[str, Any]) -> str | None:
    return None if table.get("user") is None else str(table["user"])


def _number(table: Mapping[str, Any], key: str, otherwise: float) -> float:
    value = table.get(key, otherwise)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise ValueError(f"{key} is {value!r}; it must be a number above 0")
    return value


def _megabytes(table: Mapping[str, Any], key: str, otherwise: int) -> int:
    if f"{key}_mb" not in table and (text := table.get(key)) is not None:
        match = re.fullmatch(r"(\d+)([KMGT])i?B?", str(text).strip())
        if match is None:
            raise ValueError(f"{key} is {text!r}; write {key}_mb = 2048")
        return max(1, int(int(match[1]) * _UNITS[match[2]]))
    return int(_number(table, f"{key}_mb", otherwise))
