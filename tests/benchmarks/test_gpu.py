"""benchmarks/gpu.py and share.py to their end at a tiny size on a CPU, so that their first GPU does not find a typo.

The server is a scripted one; `python benchmarks/gpu.py --cpu-rehearsal` has vLLM, and a run.
"""

import contextlib
import io
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loop_recipes.config.loop_config import LoopConfig, read_config
from rollout_server.inference import command, server_group
from rollout_server.inference import server as vllm_server
from support import fake_vllm
from support.experiment_scripts import load_script
from support.small_runs import random_adapter

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROVES_NOTHING = pytest.mark.fault("a benchmark of the GPU path passed whatever server or learner computed with")


@pytest.fixture
def gpu():
    return load_script("benchmarks/gpu.py")


@pytest.fixture
def shared(monkeypatch, tmp_path):
    """Runs share.py, rehearsed with a scripted server; returns its rows by case and metric."""
    for module in (vllm_server, server_group):
        monkeypatch.setattr(module, "installed_vllm", lambda: command.Vllm("0.32.0", cpu=True))
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*fake):
        words = [sys.executable, fake_vllm.__file__, *fake, "--port"]
        monkeypatch.setattr(vllm_server, "server_command", lambda model, servers, port, *, cpu: [*words, str(port)])
        monkeypatch.setattr(sys, "argv", ["share.py", "--cpu-rehearsal", "--json", str(tmp_path / "rows")])
        runpy.run_path(str(FOLDER / "share.py"), run_name="__main__")
        rows = {}
        for row in json.loads((tmp_path / "rows").read_text()):
            case = row["case"].partition(", CPU")[0].split("tiny-served ")[1]
            rows.setdefault(case, {})[row["metric"]] = row["value"]
        return rows

    return run


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


def rows_of(gpu, monkeypatch, results):
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu", "--size", "tiny", "--json", str(results)])
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
    rows = rows_of(gpu, monkeypatch, tmp_path / "gpu.json")
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
    assert rows_of(gpu, monkeypatch, tmp_path / "gpu.json") == rows
    assert capsys.readouterr().out.count("done before") == 6


def test_a_device_in_turns_and_divided_is_measured_in_one_run(shared, capfd):
    rows = shared()
    assert list(rows) == ["in turns, start", "in turns, turn 0", "divided, start", "divided"]
    turn = rows["in turns, turn 0"]
    assert (turn.pop("gap"), turn.pop("weights_that_differ"), turn["weights"]) == (0, 0, 1)
    assert turn["turn_seconds"] >= turn["update_seconds"] + turn["sample_seconds"]
    assert min(turn.values()) > 0 < min(rows["divided"].values())
    controls = re.findall(r"^control: (.*): refused, .*canary: ", capfd.readouterr().err, re.MULTILINE)
    adapters = ["another adapter", "no adapter"]
    assert controls == [*adapters, "a server whose weights were overwritten", *adapters]


@PROVES_NOTHING
def test_a_server_that_computes_as_before_with_overwritten_weights_is_an_error(shared):
    with pytest.raises(SystemExit, match="weights were overwritten was not refused, so that nothing is proven"):
        shared("--misbehave", "keeps its weights")


@PROVES_NOTHING
@pytest.mark.parametrize("scale", [0.0, 1e-4])
def test_an_adapter_that_changes_nothing_is_an_error(gpu, monkeypatch, scale):
    drawn = load_script("benchmarks/drawn.py")
    monkeypatch.setattr(drawn, "random_adapter", lambda shapes, seed: random_adapter(shapes, seed, scale))
    with pytest.raises(SystemExit, match="without its adapter was not refused"):
        learned(drawn, "qwen3_4b_one_gpu")


KINDS = """
qwen3_4b_one_gpu
qwen3_4b_24gb enable_activation_offloading=True update.micro_batch_tokens=8192
qwen3_5_4b_one_gpu
gpt_oss_20b
qwen3_30b_a3b
"""


@pytest.mark.parametrize("words", KINDS.split("\n")[1:-1])
def test_a_model_of_every_kind_is_drawn_and_learns_by_its_config(gpu, words):
    drawn = load_script("benchmarks/drawn.py")
    config, *said = words.split()
    own, gap = learned(drawn, config)
    assert gap < drawn.TOLERANCE / 10
    assert own.update.run(drawn.made_up(96, 400), 0, 1).metrics["grad_norm"] > 0
    assert own.conf == learned(drawn, config, *said)[0].conf, "what its YAML says is what is measured"


def learned(drawn, config, *words):
    cfg = drawn.composed(config, [*words, *drawn.FOR_UPDATES], tiny=True)
    with drawn.process_group(torch.device("cpu")):
        own = drawn.learner(read_config(cfg, LoopConfig))
        return own, drawn.packing_gap(own)


def test_both_engines_compute_the_same_with_fused_norms_and_rotary_steps(gpu):
    drawn = load_script("benchmarks/drawn.py")
    samples, found = drawn.made_up(96, 400), []
    for words in (["dtype=fp32"], ["dtype=fp32", "model._component_=drawn.general_model"]):
        own, _ = learned(drawn, "qwen3_4b_one_gpu", *words)
        found.append(torch.cat([*own.update.scorer.logprobs(samples, 0).values()]))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_rehearsal_has_the_steps_of_gpu_day_and_goes_on(gpu, monkeypatch, capsys, tmp_path):
    shown = []
    for words in (["--day", "--dry"], ["--cpu-rehearsal", "--dry"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit, match=r"^0$"):
            gpu.main()
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0] == shown[1]
    assert len(shown[0]) == len(gpu.DAY) + 1
    assert sum(step.seconds for step in gpu.DAY) <= gpu.MOST_S == 13 * 60
    day = re.findall(r"^[^#\n]*benchmarks/\S+\.py.*", (FOLDER / "gpu_day.sh").read_text(), re.MULTILINE)
    assert len(day) == 2
    assert all("benchmarks/gpu.py --day " in line for line in day)

    begun, codes = [], iter([0, 124, 1, *[0] * 100])

    def ended(command, **options):
        begun.append(command)
        return subprocess.CompletedProcess(command, next(codes))

    monkeypatch.setattr(gpu.subprocess, "run", ended)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu-rehearsal", "--json", str(tmp_path / "rows")])
    for status in (r"^1$", r"^0$"):
        with pytest.raises(SystemExit, match=status):
            gpu.main()
    steps = [step.words.replace("ROWS", str(tmp_path / "rows")).split()[1:] for step in gpu.DAY]
    assert [command[6:-1] for command in begun] == [*steps, *steps[1:3]], "what had not ended well is begun again"
    assert {command[-1] for command in begun} == {"--cpu-rehearsal"}
    rows = json.loads((tmp_path / "rows").read_text())
    assert {row["value"] for row in rows if row["metric"] == "exit status"} == {0}


def test_a_rehearsed_step_measures_its_case_alone(gpu, monkeypatch, capsys):
    monkeypatch.setitem(gpu.CASES, "run", lambda size, device, args: {"device": device.type})
    monkeypatch.setattr(gpu, "run_day", None)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--case", "run", "--cpu-rehearsal"])
    gpu.main()
    assert json.loads(capsys.readouterr().out) == {"device": "cpu"}
