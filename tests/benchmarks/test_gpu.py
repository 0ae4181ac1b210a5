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
from loop_recipes.engine.batching import collate
from loop_recipes.engine.decoder import attach_head
from loop_recipes.engine.general_decoder import general_decoder, read_weights
from loop_recipes.engine.logprobs import TiledLogProbs
from loop_recipes.engine.model import adapter_parameters
from loop_recipes.engine.samples import made_up
from loop_recipes.engine.sharding import place_model
from model_families.base_model import BaseModel
from rollout_server.inference import command, server_group
from rollout_server.inference import server as vllm_server
from support import fake_vllm
from support.experiment_scripts import load_script
from support.small_runs import random_adapter

FOLDER = Path(__file__).parents[2] / "benchmarks"
PROVES_NOTHING = pytest.mark.fault(
    "a benchmark of the GPU path passed whatever the server or the learner computed with"
)


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
            rows.setdefault(row["case"].partition(", CPU")[0].split("tiny-served ")[1], {})[row["metric"]] = row[
                "value"
            ]
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
    parts = [part for part in gpu.PARTS if part != "run"]
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


def test_a_device_in_turns_and_divided_is_measured_in_one_run(shared, capfd):
    rows = shared()
    assert list(rows) == ["in turns, start", "in turns, turn 0", "divided, start", "divided"]
    turn = rows["in turns, turn 0"]
    assert (turn.pop("gap"), turn.pop("weights_that_differ"), turn["weights"]) == (0, 0, 1)
    assert turn["turn_seconds"] >= turn["update_seconds"] + turn["sample_seconds"]
    assert min(turn.values()) > 0 < min(rows["divided"].values())
    controls = [
        "another adapter",
        "no adapter",
        "a server whose weights were overwritten",
        "another adapter",
        "no adapter",
    ]
    said = capfd.readouterr().err
    assert re.findall(r"^control: (.*): refused, .*canary: ", said, re.MULTILINE) == controls


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


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("qwen3_4b_one_gpu", []),
        ("qwen3_4b_24gb", []),
        ("qwen3_4b_one_gpu", ["model._component_=drawn.general_model"]),
        ("qwen3_5_4b_one_gpu", []),
        ("gpt_oss_20b", []),
        ("qwen3_30b_a3b", []),
    ],
)
def test_a_model_of_every_kind_is_drawn_and_learns_by_its_config(gpu, config, words):
    drawn = load_script("benchmarks/drawn.py")
    own, gap = learned(drawn, config, *words)
    assert gap < drawn.TOLERANCE / 10
    assert own.update.run(drawn.made_up(96, 400), 0, 1).metrics["grad_norm"] > 0
    assert own.conf.enable_activation_offloading == (config == "qwen3_4b_24gb")
    assert own.conf.update.micro_batch_tokens == {"qwen3_4b_24gb": 8192}.get(config, 32768)


def learned(drawn, config, *words):
    cfg = drawn.composed(config, [*words, *drawn.FOR_UPDATES], tiny=True)
    with drawn.process_group(torch.device("cpu")):
        own = drawn.learner(read_config(cfg, LoopConfig))
        return own, drawn.packing_gap(own)


def test_the_fused_steps_of_transformers_modules_are_its_own_to_rounding(gpu, tmp_path):
    drawn = load_script("benchmarks/drawn.py")
    folder = drawn.drawn_folder("Qwen3-4B", None, True, False)
    base = BaseModel.read(folder, general=True)
    weights, buffers = read_weights(folder, base, torch.float32)
    found = []
    for change in (lambda model: model, drawn.fused):
        with torch.device("meta"):
            model = attach_head(change(general_decoder(folder, base, 4, 8)), TiledLogProbs())
        adapter = random_adapter(adapter_parameters(model), seed=1)
        place_model(model, weights | buffers, adapter, torch.device("cpu"), torch.float32)
        batch = collate([made_up("one", 50, 400, torch.Generator().manual_seed(0))], 0, True)
        logprobs = model(**batch.inputs()).logprobs
        logprobs.sum().backward()
        found.append([logprobs, *(p.grad for p in adapter_parameters(model).values())])
    for own, theirs in zip(*found, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-5)


def test_a_rehearsal_has_the_steps_of_gpu_day_and_a_failed_or_cut_step_loses_nothing(
    gpu, monkeypatch, capsys, tmp_path
):
    shown = []
    for words in (["--day", "--dry"], ["--cpu-rehearsal", "--dry"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit, match=r"^0$"):
            gpu.main()
        shown.append(capsys.readouterr().out.splitlines())
    assert shown[0] == shown[1]
    assert len(shown[0]) == len(gpu.DAY) + 1
    assert sum(step.seconds for step in gpu.DAY) <= gpu.MOST_S == 13 * 60
    day = re.findall(r"^[^#]*benchmarks/\S+\.py.*", (FOLDER / "gpu_day.sh").read_text(), re.MULTILINE)
    assert len(day) == 2
    assert all("benchmarks/gpu.py --day " in line for line in day)

    begun, codes = [], [0, 124, 1, 0]
    endless = iter([*codes, *[0] * 100])

    def ended(command, **options):
        begun.append(command)
        return subprocess.CompletedProcess(command, next(endless))

    monkeypatch.setattr(gpu.subprocess, "run", ended)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--cpu-rehearsal", "--json", str(tmp_path / "rows")])
    for status in (r"^1$", r"^0$"):
        with pytest.raises(SystemExit, match=status):
            gpu.main()
    assert all(command[-1] == "--cpu-rehearsal" for command in begun)
    assert [command[5:-1] for command in begun[: len(gpu.DAY)]] == [
        step.words.replace("ROWS", str(tmp_path / "rows")).split()[1:] for step in gpu.DAY
    ]
    assert len(begun) == len(gpu.DAY) + 2, "those that had not ended well are begun again"
    rows = json.loads((tmp_path / "rows").read_text())
    assert {row["case"] for row in rows} == {f"{step.name}, {gpu.machine('cpu')}" for step in gpu.DAY}
    assert {row["value"] for row in rows if row["metric"] == "exit status"} == {0}
