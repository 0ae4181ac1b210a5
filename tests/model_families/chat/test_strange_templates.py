"""Templates of strangers that do not end, or write more than there is room for: one line, soon, and the process goes
on as it was."""

import json
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from loop_plumbing import bounded_work
from model_families.chat import template
from model_families.chat.template import ChatTemplate
from support.texts import texts_beside

TABLES = texts_beside(__file__)
MESSAGES = [{"role": "user", "content": "x" * 1000}]
pytestmark = [
    pytest.mark.attack,
    pytest.mark.fault("a chat template of somebody else's folder does not end, or takes all memory"),
]


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setattr(template, "CPU_S", 0.5)
    monkeypatch.setattr(template, "MEMORY", 256 << 20)
    before = resource.getrlimit(resource.RLIMIT_DATA), threading.active_count()

    def of(text, **beside):
        (tmp_path / "chat_template.jinja").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(beside))
        return ChatTemplate(tmp_path)

    yield of
    assert (resource.getrlimit(resource.RLIMIT_DATA), threading.active_count()) == before


@pytest.mark.parametrize("name", TABLES["templates_that_are_bounded"])
def test_a_template_is_bounded_in_time_and_memory(opened, name):
    text, why = TABLES["templates_that_are_bounded"][name]
    strange = opened(text)
    began = time.monotonic()
    with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match=why) as raised:
        other.submit(strange.render, MESSAGES).result() if name.startswith("loops") else strange.render(MESSAGES)
    assert time.monotonic() - began < 20
    assert "\n" not in str(raised.value)
    assert opened("{{ messages[0].content }}").render(MESSAGES) == "x" * 1000
    assert len(bytearray(512 << 20)) == 512 << 20, "what others take is not bounded"


def test_what_an_honest_template_computes_is_rendered(opened):
    honest = opened(
        "{{ 3 * 4 }} {{ 2 ** 10 }} {{ 1.5 * 2 }} {{ '-' * 70 }} {% for m in messages %}{{ m.role }}{% endfor %}"
    )
    assert honest.render(MESSAGES * 3) == f"12 1024 3.0 {'-' * 70} useruseruser"


def test_bounds_within_each_other_and_of_threads_at_once(opened):
    def work(seconds):
        with bounded_work.bounded(10.0, 1 << 30), bounded_work.bounded(10.0, 1 << 20):
            time.sleep(seconds)
            return resource.getrlimit(resource.RLIMIT_DATA)

    usual = resource.getrlimit(resource.RLIMIT_DATA)
    with ThreadPoolExecutor(2) as pool:
        assert usual not in pool.map(work, (0.2, 0.0))


def test_only_time_of_the_processor_counts(opened):
    with bounded_work.bounded(0.2, 1 << 30):
        time.sleep(0.5)


@pytest.mark.parametrize("seconds", [10.0, 0.0], ids=["in time", "late"])
def test_a_debugger_steps_through_what_comes_after(seconds):
    code = f"""
import contextlib, sys, time
from loop_plumbing.bounded_work import TooMuch, bounded
with contextlib.suppress(TooMuch), bounded({seconds}, 1 << 30):
    until = time.monotonic() + 0.5
    while time.monotonic() < until: pass
def steps(frame, event, argument): return steps
sys.settrace(steps)
contextlib.suppress(ValueError)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[3])
