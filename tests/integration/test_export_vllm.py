"""An exported policy behind a plain vLLM server, by the line that the export says, is the policy of the run."""

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer

from loop_plumbing import process_guard
from loop_recipes.export.comparison import Difference, sampled_logprobs, stored_samples
from loop_recipes.export.policy import ExportConfig, config_of_run, export
from loop_recipes.paths import loop_package
from rollout_server.inference.server import free_port
from support import small_runs
from support.waiting import DEADLINE_S, wait_until_healthy

pytestmark = pytest.mark.integration
TEXT = "print(apis.spotify.login(username='joe@mail.com', password='x_1'))\n  # 1234"


def ask(url: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(f"{url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
        return json.load(answer)


def test_a_plain_server_gives_the_runs_logprobs_and_the_tokenizers_ids(tmp_path):
    config = OmegaConf.load(small_runs.replay_config(tmp_path, iterations=2))
    config.pop("checkpointer")
    config.model = {
        "path": str(loop_package("tiny_policy")),
        "lora_rank": 8,
        "lora_alpha": 16,
        "apply_lora_to_mlp": True,
    }
    config.model.lora_attn_modules = ["q_proj", "k_proj", "v_proj", "output_proj"]
    config.optimizer.lr = 0.02
    small_runs.train(config)
    run = tmp_path / "run"
    (tmp_path / "logs").rename(run / "collections")
    done = export(run, ExportConfig())
    samples = stored_samples(run, 8, 4096)
    policy, base = sampled_logprobs(config_of_run(run)[1], samples, done.folder)
    assert Difference.between(policy, base).most > 0.1, "training changed nothing, so the comparison says nothing"
    program, *words = shlex.split(done.serve[0])
    assert program == "vllm"
    port, log_path = free_port(), tmp_path / "vllm.log"
    guard = [sys.executable, "-I", process_guard.__file__, str(os.getpid()), "5"]
    vllm = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *words, "--port", str(port), "--dtype", "float32"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with open(log_path, "wb") as log:
        process = subprocess.Popen([*guard, *vllm], stdout=log, stderr=log, start_new_session=True, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(process, f"{url}/health", log_path)
        name = words[-1].partition("=")[0]
        served = []
        for sample in samples:
            ids = sample.token_ids.tolist()
            body = {"model": name, "prompt": ids, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            found = ask(url, "/v1/completions", body)["choices"][0]["prompt_logprobs"]
            served += [
                found[place][str(ids[place])]["logprob"] for place in range(len(ids)) if bool(sample.mask[place])
            ]
        apart = Difference.between(torch.tensor(served), policy)
        print(f"served log-probs of {len(served)} tokens: {apart} from the run's")
        assert apart.most < 1e-3
        ids = ask(url, "/tokenize", {"model": name, "prompt": TEXT, "add_special_tokens": False})["tokens"]
        assert ids == Tokenizer.from_file(str(done.folder / "tokenizer.json")).encode(TEXT).ids
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(DEADLINE_S)
