"""The rules of ``make quick``: no test of it starts a process or imports what takes seconds to import.

Its tests are all those of the folders that the Makefile names, but those marked ``slow``. A test that breaks a rule
fails, and says so. A file that breaks one when it is imported is left out and counted, unless it is of the ``CORE``.
A property is tried on a few examples, whatever its file says: the whole suite tries them all.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

SLOW_IMPORTS = frozenset(
    (
        *("anthropic", "matplotlib", "openai", "peft", "playwright", "torchao", "torchtune", "transformers", "vllm"),
        *("torch._dynamo", "torch.distributed.fsdp", "torch.nn.attention.varlen"),
    )
)
PROCESS_EVENTS = frozenset(
    ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "pty.spawn", "subprocess.Popen")
)
"""What Python calls the start of a process in its audit events."""
EXAMPLES = 6
"""Of a property, at most."""
CPU_LIMIT_S = 3.0
"""Of one test: ten times what the longest takes on a core of its own."""
CORE = frozenset(
    (
        "loop_formats/test_ids.py",
        "loop_formats/test_rollout.py",
        "loop_formats/test_schema.py",
        "loop_recipes/algorithm/test_advantages.py",
        "loop_recipes/algorithm/test_losses.py",
        "loop_recipes/algorithm/test_minibatches.py",
        "loop_recipes/algorithm/test_sampler_correction.py",
        "loop_recipes/engine/test_batching.py",
        "loop_recipes/engine/test_samples.py",
        "loop_recipes/engine/test_step_plan.py",
        "loop_recipes/evaluation/test_scores.py",
        "loop_recipes/rollouts/test_task_sampler.py",
        "rollout_server/collecting/test_collector.py",
        "rollout_server/collecting/test_episode.py",
        "rollout_server/collecting/test_rollout_log.py",
        "rollout_server/endpoint/test_messages.py",
    )
)


class QuickRules:
    """A plugin of pytest.

    Args:
        with_torch: torch, which takes two seconds, may be imported.
    """

    def __init__(self, with_torch: bool) -> None:
        self.closed = SLOW_IMPORTS if with_torch else SLOW_IMPORTS | {"torch"}
        if with_torch:
            import torch  # noqa: F401 - its CUDA build asks ldconfig when it is imported, from 2.15 on
        self.collecting = True
        self.broken = ""
        self.began = 0.0
        self.left_out: list[str] = []
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "import" and arguments[0] in self.closed:
            self.broken = f"imports {arguments[0]}"
        elif event in PROCESS_EVENTS:
            self.broken = "starts a process"
        else:
            return
        if self.collecting:
            raise pytest.skip.Exception(self.broken, allow_module_level=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Iterator[None]:
        self.broken = ""
        report: Any = yield
        if self.broken and isinstance(collector, pytest.Module):
            name = collector.nodeid.removeprefix("tests/")
            if name in CORE:
                report.outcome = "failed"
                report.longrepr = f"{name} {self.broken}, but make quick needs it: do that in its slow tests"
            else:
                self.left_out.append(name)
        return report

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        tests = {item.obj for item in items if isinstance(item, pytest.Function)}
        for test in filter(hypothesis.is_hypothesis_test, tests):
            own = test._hypothesis_internal_use_settings  # has no public name
            few = hypothesis.settings(own, max_examples=min(EXAMPLES, own.max_examples))
            test._hypothesis_internal_use_settings = few

    def pytest_collection_finish(self) -> None:
        self.collecting = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.broken, self.began = "", time.process_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report: Any = yield
        took = time.process_time() - self.began
        if not self.broken and took > CPU_LIMIT_S:
            self.broken = f"takes {took:.1f} s"
        if self.broken and report.passed and call.when == "call":
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} {self.broken}: mark it slow, and make quick leaves it out"
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.write_line(f"left out for what they import: {len(self.left_out)} files; make unit has them")
