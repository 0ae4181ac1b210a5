"""Every part of benchmarks/gpu.py, at its tiny size on a CPU, so that its first GPU does not find a typo.

The part of the server runs on a scripted one; as a drill, on vLLM.
"""

import contextlib
import importlib.util
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from rollout_server.inference import server as vllm_server
from support import fake_vllm
from support.waiting import COMMAND_S

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", FOLDER / "gpu.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def in_this_process(monkeypatch):
    """Takes the place of ``gpu.measure``: the cases' own programs, but here, where torchtune is imported already."""

    def measure(command, seconds):
        measure.ran.append(command)
        monkeypatch.setattr(sys, "argv", command[1:])
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                runpy.run_path(command[1], run_name="__main__")
        except (ImportError, ValueError, SystemExit) as error:
            return {"left_out": str(error)}
        return json.loads(printed.getvalue().splitlines()[-1])

    measure.ran = []
    return measure


def run_tiny(gpu, monkeypatch, results, *words):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--size", "tiny", "--json", str(results), *words])
    gpu.main()


def test_a_case_runs_in_a_process_of_its_own_with_a_deadline(gpu):
    def measured(code, seconds=60.0):
        return gpu.measure([sys.executable, "-c", code], seconds)

    assert measured("print('a line'); print('{\"seconds\": 1.5}')") == {"seconds": 1.5}
    assert measured("raise SystemExit('no such kernel')") == {"left_out": "no such kernel"}
    assert measured("import time; time.sleep(600)", 0.0) == {"left_out": "the part's 600 s are over"}


def test_every_part_of_the_learner_runs_and_the_same_command_goes_on(
    gpu, in_this_process, monkeypatch, capsys, tmp_path
):
    def main(*words):
        parts = [part for part in gpu.PARTS if part != "vllm"]
        run_tiny(gpu, monkeypatch, results, "--parts", *parts, *words)
        return capsys.readouterr().out

    results = tmp_path / "gpu.json"
    monkeypatch.setattr(gpu, "measure", in_this_process)
    said = main()
    rows = json.loads(results.read_text())
    metrics = {(row["case"].split()[0], row["metric"]): row["value"] for row in rows}
    assert metrics["ours_tiled", "logprob_error"] < 1e-4
    assert metrics["ours_tiled", "gradient_repeats_that_differ"] == 0
    assert metrics["ours_tiled", "seconds"] > 0
    assert metrics["ours", "packed_logprob_difference"] < 0.05
    assert metrics["ours", "resumed_adapter_difference"] == 0
    assert metrics["ours", "update_seconds"] > 0
    published = [
        row["case"] for row in rows if "one sequence of 96 tokens" in row["case"] and row["metric"] == "layers"
    ]
    assert [case.split("tokens, ")[1].split(",")[0] for case in published] == [
        "attention=fa2",
        "attention=fa2 keep_attention=True",
    ]
    assert {row["unit"] for row in rows} <= {"", "s", "MiB", "GiB", "nats", "tokens/s"}
    # Kernels for CUDA say why they do not run here, in one line each.
    left_out = [line for line in said.splitlines() if "left out" in line]
    assert len(left_out) == 5
    assert all("CUDA" in line or "cut_cross_entropy" in line or "triton" in line for line in left_out), left_out

    in_this_process.ran.clear()
    assert main().count("done before") == 6
    assert len(in_this_process.ran) == 5, "those that were left out are tried again"
    assert main("--only", "^ours_tiled.*repeats$").count("tokens") == 1, "cases that the expression finds"
    assert json.loads(results.read_text()) == rows


@pytest.mark.parametrize("server", ["scripted", pytest.param("vLLM", marks=pytest.mark.drill)])
def test_the_part_of_the_server_runs(gpu, in_this_process, monkeypatch, tmp_path, server):
    monkeypatch.setattr(gpu, "PART_SECONDS", COMMAND_S)
    if server == "scripted":
        monkeypatch.setattr(gpu, "measure", in_this_process)
        fake = [sys.executable, fake_vllm.__file__, "--port"]
        monkeypatch.setattr(vllm_server, "server_command", lambda model, servers, port, *, cpu: [*fake, str(port)])
    run_tiny(gpu, monkeypatch, tmp_path / "gpu.json", "--parts", "vllm")
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {row["metric"]: row["unit"] for row in rows} == {
        "start_seconds": "s",
        "publish_seconds": "s",
        "prefill_tokens_per_s": "tokens/s",
        "sampled_tokens_per_s": "tokens/s",
    }
    assert all(row["value"] > 0 for row in rows)
