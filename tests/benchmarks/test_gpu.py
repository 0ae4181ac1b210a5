"""benchmarks/gpu.py and share.py to their end at a tiny size on a CPU, so that their first GPU does not find a typo.

The server is a scripted one; as a drill, vLLM.
"""

import contextlib
import io
import json
import runpy
import sys
from pathlib import Path

import pytest

from rollout_server.inference import command, server_group
from rollout_server.inference import server as vllm_server
from support import fake_vllm
from support.experiment_scripts import load_script
from support.waiting import COMMAND_S

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def gpu():
    return load_script("benchmarks/gpu.py")


@pytest.fixture
def scripted_server(monkeypatch):
    fake = [sys.executable, fake_vllm.__file__, "--port"]
    monkeypatch.setattr(vllm_server, "server_command", lambda model, servers, port, *, cpu: [*fake, str(port)])
    for module in (vllm_server, server_group):
        monkeypatch.setattr(module, "installed_vllm", lambda: command.Vllm("0.32.0", cpu=False))


def measure_here(words, seconds):
    """Takes the place of ``gpu.measure``: a case's own program, but here, where torchtune is imported already."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patched, contextlib.redirect_stdout(printed):
        patched.setattr(sys, "argv", words[1:])
        try:
            runpy.run_path(words[1], run_name="__main__")
        except (ImportError, ValueError, SystemExit) as error:
            return {"left_out": str(error)}
    return json.loads(printed.getvalue().splitlines()[-1])


def rows_of(gpu, monkeypatch, results, *parts):
    words = ["gpu.py", "--device", "cpu", "--size", "tiny", "--json", str(results), "--parts", *parts]
    monkeypatch.setattr(sys, "argv", words)
    gpu.main()
    return json.loads(results.read_text())


def test_a_case_runs_in_a_process_of_its_own_with_a_deadline(gpu):
    def measured(code, seconds=60.0):
        return gpu.measure([sys.executable, "-c", code], seconds)

    assert measured("print('a line'); print('{\"seconds\": 1.5}')") == {"seconds": 1.5}
    assert measured("raise SystemExit('no such kernel')") == {"left_out": "no such kernel"}
    assert measured("import time; time.sleep(600)", 0.0) == {"left_out": "the part's 600 s are over"}


def test_every_part_of_the_learner_runs_and_the_same_command_goes_on(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "measure", measure_here)
    parts = [part for part in gpu.PARTS if part != "vllm"]
    rows = rows_of(gpu, monkeypatch, tmp_path / "gpu.json", *parts)
    metrics = {(row["case"].split()[0], row["metric"]): row["value"] for row in rows}
    assert metrics["ours_tiled", "logprob_error"] < 1e-4
    assert metrics["ours_tiled", "gradient_repeats_that_differ"] == 0
    assert metrics["ours", "packed_logprob_difference"] < 0.05
    assert metrics["ours", "resumed_adapter_difference"] == 0
    assert min(metrics["ours_tiled", "seconds"], metrics["ours", "update_seconds"]) > 0
    # Kernels for CUDA say why they do not run here, in one line each.
    left_out = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert len(left_out) == 5
    assert all("CUDA" in line or "cut_cross_entropy" in line or "triton" in line for line in left_out), left_out
    assert rows_of(gpu, monkeypatch, tmp_path / "gpu.json", *parts) == rows
    assert capsys.readouterr().out.count("done before") == 6


@pytest.mark.parametrize("server", ["scripted", pytest.param("vLLM", marks=pytest.mark.drill)])
def test_the_part_of_the_server_runs(gpu, monkeypatch, tmp_path, request, server):
    monkeypatch.setattr(gpu, "PART_SECONDS", COMMAND_S)
    if server == "scripted":
        request.getfixturevalue("scripted_server")
        monkeypatch.setattr(gpu, "measure", measure_here)
    rows = rows_of(gpu, monkeypatch, tmp_path / "gpu.json", "vllm")
    metrics = {"start_seconds", "publish_seconds", "prefill_tokens_per_s", "sampled_tokens_per_s"}
    assert {row["metric"] for row in rows} == metrics
    assert all(row["value"] > 0 for row in rows)


def test_a_device_in_turns_and_divided_is_measured_in_one_run(scripted_server, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    sizes = ["--turns", "2", "--canary", "16", "--tokens", "64", "--requests", "2", "--prompt", "8", "--sampled", "4"]
    monkeypatch.setattr(sys, "argv", ["share.py", "--config", "tiny_cpu", "--json", str(tmp_path / "rows"), *sizes])
    runpy.run_path(str(FOLDER / "share.py"), run_name="__main__")
    rows = {}
    for row in json.loads((tmp_path / "rows").read_text()):
        rows.setdefault(row["case"].removesuffix(", CPU"), {})[row["metric"]] = row["value"]
    both = ["in turns, start", "in turns, turn 0", "in turns, turn 1", "divided, start", "divided"]
    assert list(rows) == [f"tiny_cpu {case}" for case in both]
    turn = rows["tiny_cpu in turns, turn 1"]
    assert turn.pop("gap") == 0
    assert turn["turn_seconds"] >= turn["update_seconds"] + turn["sample_seconds"]
    assert min(turn.values()) > 0 < min(rows["tiny_cpu divided"].values())
