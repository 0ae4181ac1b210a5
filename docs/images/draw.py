"""Draws the pictures of README.md and docs/architecture.md: how the parts fit, the tokens of an episode, the demo.

    python docs/images/draw.py                      # writes fits.svg, tokens.svg and demo.svg beside this file
    python docs/images/draw.py --record make demo   # runs the command and writes what demo.svg shows to demo.txt

Each is light or dark as the page around it is. The demo's lines appear at their recorded times, forty times as fast.
"""

import re
import subprocess
import sys
import textwrap
import time
from html import escape
from pathlib import Path

STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #1f2328; }
.small { font-size: 12px; fill: #59636e; }
.title { font-weight: 600; }
.box { fill: #f6f8fa; stroke: #8c959f; }
.sampled { fill: #cfe5f7; stroke: #0072b2; }
.newer { fill: #fbdcc6; stroke: #d55e00; }
.arrow { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#head); }
#head path { fill: #59636e; }
.line { font: 12px ui-monospace, monospace; white-space: pre; animation: appear 0s both; }
@keyframes appear { from { visibility: hidden; } }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .small { fill: #9198a1; }
  .box { fill: #161b22; stroke: #6e7681; }
  .sampled { fill: #0d3a5c; stroke: #56b4e9; }
  .newer { fill: #5a2a0c; stroke: #e69f00; }
  .arrow { stroke: #9198a1; }
  #head path { fill: #9198a1; }
}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker></defs>"""


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a whole picture; ``title`` is what a screen reader says."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", STYLE, *parts, "</svg>", ""])


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """Return a line of text whose baseline is at ``y``."""
    return f'<text x="{x}" y="{y}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, lines: list[str], kind: str = "box") -> list[str]:
    """Return a box; the first of its lines is its name."""
    middle, first = x + width / 2, y + height / 2 - 8.5 * (len(lines) - 1) + 5
    words = [text(middle, first + 17 * at, line, "small" if at else "title") for at, line in enumerate(lines)]
    return [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>', *words]


def arrow(path: str) -> str:
    """Return an arrow along ``path``."""
    return f'<path class="arrow" d="{path}"/>'


def fits() -> str:
    """Tasks, node, log, trainer and policies, and what goes from each to the next."""
    node = [
        "plays the episodes of each task",
        "vLLM servers",
        "code runs in a sandbox;",
        "the grade is made outside it",
    ]
    trainer = ["a torchtune recipe:", "log-probs anew,", "leave-one-out", "advantages,", "LoRA update"]
    parts = [
        *box(10, 60, 170, 110, ["Task", "a Python file,", "AppWorld, another world,", "or an agent program"]),
        *box(260, 30, 230, 170, ["Rollout node", *node]),
        *box(555, 60, 150, 110, ["Log", "token ids, log-probs,", "policy versions,", "reward"]),
        *box(780, 30, 150, 170, ["Trainer", *trainer]),
        *box(420, 236, 290, 52, ["Policy versions", "PEFT adapters, each proven before it samples"]),
    ]
    for path, x, y, words in (
        ("M180 115H258", 219, 105, "tasks"),
        ("M490 115H553", 521, 105, "rollouts"),
        ("M705 115H778", 741, 105, "groups"),
        ("M855 200V262H712", 790, 254, "new adapter"),
        ("M420 262H375V202", 345, 254, "served"),
    ):
        parts += [arrow(path), text(x, y, words, "small")]
    return svg(
        940, 300, "Tasks go to the rollout node, rollouts to a log and the trainer, adapters back to the node", parts
    )


def tokens() -> str:
    """One episode as the learner sees it."""
    spans = [
        ("system, task", 150, "0", "", "box"),
        ("turn 1", 130, "1", "7", "sampled"),
        ("observation", 110, "0", "", "box"),
        ("turn 2", 160, "1", "7", "sampled"),
        ("observation", 110, "0", "", "box"),
        ("turn 3", 120, "1", "8", "newer"),
    ]
    x, parts = 120.0, []
    for name, width, mask, version, kind in spans:
        parts += box(x, 20, width, 40, [name], kind)
        parts += [text(x + width / 2, 86, mask), text(x + width / 2, 112, version or "-")]
        parts.append(text(x + width / 2, 138, "as sampled" if version else "-", "small"))
        x += width
    for y, name in ((45, "token ids"), (86, "mask"), (112, "policy version"), (138, "log-prob")):
        parts.append(text(110, y, name, "small", "end"))
    below = "The loss is over the tokens of mask 1. Their log-probs are computed again, under the version of each."
    return svg(
        920,
        190,
        "One episode: which tokens the policy sampled, and under which version",
        [*parts, text(120, 174, below, "small", "start")],
    )


RECORDING = Path(__file__).with_name("demo.txt")
FASTER, COLUMNS, ROWS, ROW = 40, 110, 24, 17
TABLE = ("┏", "┃", "┡", "│", "└")


def record(command: list[str]) -> None:
    """Run a command, show what it prints, and write each line with its seconds since the start to ``demo.txt``."""
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        lines = [f"0\t$ {' '.join(command)}\n"]
        for line in run.stdout:
            print(line, end="", flush=True)
            lines.append(f"{time.monotonic() - began:.0f}\t{line.replace(f'{Path.cwd()}/', '')}")
    RECORDING.write_text("".join(lines))
    sys.exit(run.returncode)


def demo() -> str:
    """Draw the recorded lines as a terminal shows them: each once it was printed, the earlier ones scrolled away.

    Of the pictures' names only the first is drawn, so that the scores are seen at the end. A table is cut at the edge.
    """
    recorded = [line.partition("\t") for line in RECORDING.read_text().splitlines()]
    listed = [place for place, (_, _, words) in enumerate(recorded) if re.fullmatch(r"\S+\.(png|svg)", words)]
    rows: list[tuple[float, str]] = []
    for place, (seconds, _, words) in enumerate(recorded):
        if place in listed[1:]:
            continue
        at = int(seconds) / FASTER
        if words.startswith(TABLE):
            rows.append((at, words if len(words) <= COLUMNS else f"{words[: COLUMNS - 1]}\u2026"))
        else:
            words += f" and {len(listed) - 1} more" if place in listed else ""
            rows += [(at, part) for part in textwrap.wrap(words, COLUMNS, drop_whitespace=False) or [""]]
    times = [at for at, _ in rows]
    parts, scrolls = [], ["0% { transform: none; }"]
    for number, (at, shown) in enumerate(rows, 1):
        place = f'x="14" y="{number * ROW + 6}" class="line" style="animation-delay: {at:g}s"'
        parts.append(f"<text {place}>{escape(shown)}</text>")
        if number > ROWS:
            moved = f"transform: translateY({(ROWS - number) * ROW}px);"
            scrolls.append(f"{100 * at / times[-1]:.2f}% {{ {moved} }}")
    scroll = (
        f"@keyframes scroll {{ {' '.join(scrolls)} }} .scroll {{ animation: scroll {times[-1]:g}s step-end both; }}"
    )
    height = ROWS * ROW + 20
    frame = f'<style>{scroll}</style><rect class="box" width="840" height="{height}" rx="6"/><g class="scroll">'
    return svg(840, height, "What make demo prints, forty times as fast", [frame, *parts, "</g>"])


PICTURES = {"fits.svg": fits, "tokens.svg": tokens, "demo.svg": demo}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2:])
    for name, draw in PICTURES.items():
        Path(__file__).with_name(name).write_text(draw())
