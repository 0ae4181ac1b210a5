"""A plain vLLM server, started by the line that ``loop export`` says, and the log-probs that it gives stored tokens."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from loop_plumbing import process_guard
from loop_recipes.engine.samples import Sample
from rollout_server.inference.command import SERVER_MODULE
from rollout_server.inference.server import free_port
from support.waiting import DEADLINE_S, wait_until_healthy


@dataclass(frozen=True)
class PlainServer:
    """A running server at ``url``, and the ``name`` under which it serves the policy."""

    url: str
    name: str

    def ask(self, path: str, **body: Any) -> Any:
        """What it answers to a request about its policy."""
        content = json.dumps({"model": self.name, **body}).encode()
        request = urllib.request.Request(f"{self.url}{path}", content, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            return json.load(answer)

    def logprobs(self, samples: Sequence[Sample]) -> Tensor:
        """The log-probs [n] of the sampled tokens of all samples, one after the other."""
        found = []
        for sample in samples:
            ids = sample.token_ids.tolist()
            answer = self.ask("/v1/completions", prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=0)
            each = answer["choices"][0]["prompt_logprobs"]
            found += [each[place][str(ids[place])]["logprob"] for place in range(len(ids)) if bool(sample.mask[place])]
        return torch.tensor(found)


@contextmanager
def plain_server(line: str, log_path: Path) -> Iterator[PlainServer]:
    """Run a line of ``vllm serve`` that ends with the policy's name, in fp32 on a port of its own."""
    assert line.startswith("vllm serve ")
    model, *words = shlex.split(line)[2:]
    port = free_port()
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), "5"]
    vllm = [sys.executable, "-P", "-m", SERVER_MODULE, "--model", model, *words, "--port", str(port)]
    vllm += ["--dtype", "float32"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with open(log_path, "wb") as log:
        process = subprocess.Popen([*guard, *vllm], stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, f"{url}/health", log_path)
        yield PlainServer(url, words[-1].partition("=")[0])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
