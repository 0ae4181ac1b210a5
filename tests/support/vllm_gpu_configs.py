"""What vLLM makes of command lines of servers; runs in an environment that has it.

    python vllm_gpu_configs.py RESULTS < CASES

CASES is a JSON list of ``{"command": [...], "environment": {...}}`` as servers are started with; RESULTS gets a JSON
list of figures of each full configuration.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.selector import get_attn_backend


def describe(config: VllmConfig) -> dict[str, Any]:
    model, scheduler, cache = config.model_config, config.scheduler_config, config.cache_config
    with set_current_vllm_config(config):
        attention = get_attn_backend(model.get_head_size(), model.dtype, cache.cache_dtype)
    return {
        "dtype": str(model.dtype),
        "head_dtype": str(model.head_dtype),
        "attention": attention.get_name(),
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "v2_runner": config.use_v2_model_runner,
        "v2_runner_lacks": config._get_v2_model_runner_unsupported_features(),
        "lora": [config.lora_config.max_lora_rank, config.lora_config.max_loras, config.lora_config.max_cpu_loras],
        "logprobs_mode": model.logprobs_mode,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": scheduler.async_scheduling,
        "prefix_caching": cache.enable_prefix_caching,
        "kv_cache_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "graphs": config.compilation_config.cudagraph_mode.name,
        "graphs_for_lora": config.compilation_config.cudagraph_specialize_lora,
        "largest_graph": config.compilation_config.max_cudagraph_capture_size,
    }


def main() -> None:
    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers())
    results = []
    for case in json.load(sys.stdin):
        os.environ.update(case["environment"])
        arguments = parser.parse_args(["serve", *case["command"][case["command"].index("--model") :]])
        serve.validate(arguments)
        engine = AsyncEngineArgs.from_cli_args(arguments)
        results.append(describe(engine.create_engine_config(UsageContext.OPENAI_API_SERVER)))
    Path(sys.argv[1]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
