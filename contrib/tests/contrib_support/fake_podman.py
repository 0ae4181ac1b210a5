#!/usr/bin/env python3
"""Stands in for podman: a container is a folder below FAKE_PODMAN, and a shell is a real bash in its folder `app`.

Its tests pay 1 where `app/hello.txt` says hello. What it is asked stands in the file `calls`; a word in the file
`broken` fails. The file `removed` counts the calls of `stop` after which somebody removes the container.
"""

import os
import shutil
import sys
import tarfile
from pathlib import Path

HOME = Path(os.environ["FAKE_PODMAN"])
WORDS = sys.argv[1:]
with open(HOME / "calls", "a") as calls:
    calls.write(" ".join(WORDS).replace("\n", " ") + "\n")
if (HOME / "broken").exists() and WORDS[0] in (HOME / "broken").read_text().split():
    sys.exit("Error: it is broken\nError: so it says")
name = WORDS[-1]
box = HOME / "containers" / name


def cp(source: str, target: str) -> None:
    if target == "-":
        owner, _, path = source.partition(":")
        place = HOME / "containers" / owner / path.lstrip("/")
        if not place.exists():
            sys.exit("Error: could not be found")
        with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
            tar.add(place.resolve(), place.resolve().name)
        return
    owner, _, path = target.partition(":")
    place = HOME / "containers" / owner / path.lstrip("/")
    if source == "-":
        with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
            tar.extractall(place, filter="data")
    else:
        shutil.copytree(source, place, dirs_exist_ok=True)


def test(box: Path, rest: list[str]) -> None:
    if "mkdir -p /tests" in " ".join(rest):
        if "/app" in rest:
            shutil.rmtree(box / "app")
        (box / "logs/verifier").mkdir(parents=True)
    else:
        hello = box / "app/hello.txt"
        paid = hello.is_file() and hello.read_text() == "hello\n"
        (box / "logs/verifier/reward.txt").write_text(f"{int(paid)}\n")
        (box / "logs/verifier/test-stdout.txt").write_text("tested\n")


match WORDS:
    case ["image", "inspect", "-f", *_]:
        print("/app")
    case ["image", "inspect", image]:
        sys.exit(0 if (HOME / "images").exists() and image in (HOME / "images").read_text() else 1)
    case ["build" | "pull", *rest]:
        with open(HOME / "images", "a") as images:
            images.write(" ".join(rest) + "\n")
    case ["run", *rest]:
        name = next(word for word in rest if word.startswith("--name=")).removeprefix("--name=")
        (HOME / "containers" / name / "app").mkdir(parents=True)
    case ["ps", *_]:
        print("\n".join(os.listdir(HOME / "containers")) if (HOME / "containers").exists() else "")
    case ["inspect", _, _, *names]:
        if not all((HOME / "containers" / name).exists() for name in names):
            sys.exit("Error: no such container")
        print("exited 0" if (box / "ended").exists() else "running 0")
    case ["stop", _] if (HOME / "removed").exists():
        (HOME / "removed").write_text((HOME / "removed").read_text()[1:])
        if not (HOME / "removed").read_text():
            shutil.rmtree(box)
    case ["rm", *_]:
        shutil.rmtree(box, ignore_errors=True)
    case ["cp", source, target]:
        cp(source, target)
    case ["exec", "-i", box_name, *shell]:
        os.chdir(HOME / "containers" / box_name / "app")
        os.execvp(shell[0], shell)
    case ["exec", *rest]:
        here = os.listdir(HOME / "containers")
        test(HOME / "containers" / next(word for word in rest if word in here), rest)
