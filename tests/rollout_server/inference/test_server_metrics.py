"""What is read out of a vLLM server's Prometheus text."""

from rollout_server.inference.server_metrics import Load, adapters_at_work, parse_load
from support.texts import texts_beside

TABLES = texts_beside(__file__)

METRICS = TABLES["metrics"]


def test_metrics_are_read():
    assert parse_load(METRICS) == Load(running=5.0, waiting=1.0, kv_usage=0.085, generated_tokens=1.2e6)
    assert parse_load("") == Load()
    assert 'running_lora_adapters=""' in adapters_at_work(METRICS)
    assert "c" in adapters_at_work(METRICS.replace("1.795261781", "1.795261791"))
    assert adapters_at_work("") == ""
