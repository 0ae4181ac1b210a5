"""What is read out of a vLLM server's Prometheus text."""

from rollout_server.inference.server_metrics import Load, adapters_at_work, parse_load

METRICS = """# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="base"} 3.0
vllm:num_requests_running{engine="1",model_name="base"} 2.0
vllm:num_requests_waiting{engine="0",model_name="base"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="base"} 8.5e-02
vllm:generation_tokens_total{engine="0",model_name="base"} 1.2e+06
vllm:lora_requests_info{max_lora="2",running_lora_adapters="",waiting_lora_adapters=""} 1.7952617832324977e+09
vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.795261781327502e+09
"""


def test_metrics_are_read():
    assert parse_load(METRICS) == Load(running=5.0, waiting=1.0, kv_usage=0.085, generated_tokens=1.2e6)
    assert parse_load("") == Load()
    assert 'running_lora_adapters=""' in adapters_at_work(METRICS)
    assert "c" in adapters_at_work(METRICS.replace("1.795261781", "1.795261791"))
    assert adapters_at_work("") == ""
