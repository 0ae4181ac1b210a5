"""What vLLM's wheel for GPUs makes of the servers of each config for GPUs, without a GPU.

GPU_PYTHON is the interpreter of an environment that `make setup GPU=1` made.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from loop_recipes.config.files import compose
from loop_recipes.config.rollout_node import described_node
from loop_recipes.paths import config_files
from rollout_server.inference.command import server_command, server_environment
from support.families import with_config
from support.stub_driver import write_stub_driver
from support.waiting import COMMAND_S

GPU_PYTHON = os.environ.get("GPU_PYTHON", "")
SCRIPT = Path(__file__).parents[2] / "support/vllm_gpu_configs.py"


@pytest.mark.drill
@pytest.mark.timeout(3600)  # where vLLM looks at its models for the first time, two more processes import all of it
@pytest.mark.skipif(not os.access(GPU_PYTHON, os.X_OK), reason="GPU_PYTHON names no Python with vLLM's wheel for GPUs")
def test_the_servers_of_every_config_for_gpus_are_what_the_configs_say(tmp_path):
    nodes = {name: described_node(compose(name)) for name in config_files()["machine"]}
    nodes = {name: node for name, node in nodes.items() if node.servers.gpus is not None}
    driver = write_stub_driver(tmp_path / "driver")
    cases = []
    for node in nodes.values():
        model = replace(node.model, path=with_config({"path": node.model.path})["path"])
        cases.append(
            {
                "command": server_command(model, node.servers, 8000, cpu=False),
                "environment": server_environment(node.servers, 0, "key", Path(node.root), cpu=False) | driver,
            }
        )
    command = [GPU_PYTHON, "-P", str(SCRIPT), str(tmp_path / "results")]
    ran = subprocess.run(
        command,
        input=json.dumps(cases),
        env=cases[0]["environment"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3 * COMMAND_S,
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    found = dict(zip(nodes, json.loads((tmp_path / "results").read_text()), strict=True))
    for name, node in nodes.items():
        model, servers = node.model, node.servers
        assert found[name] == {
            "dtype": "torch.bfloat16",
            "head_dtype": "torch.float32",
            "attention": "FLASH_ATTN",
            "max_model_len": model.max_context,
            "max_num_seqs": servers.max_num_seqs,
            "tensor_parallel_size": servers.tensor_parallel_size,
            "v2_runner": True,
            "v2_runner_lacks": [],
            "lora": [model.lora_rank, servers.max_loras, servers.max_cpu_loras],
            "logprobs_mode": "processed_logprobs",
            "chunked_prefill": True,
            "async_scheduling": True,
            "prefix_caching": True,
            "kv_cache_bytes": servers.kv_cache_bytes,
            "gpu_memory_utilization": servers.gpu_memory_utilization,
            "graphs": "FULL_AND_PIECEWISE",
            "graphs_for_lora": True,
            "largest_graph": 2 * servers.max_num_seqs,
        }, name
