"""FlashAttention-4: who gets it, what is said where it cannot be had, and its kernels where their compiler is."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.nn.attention import _fa4, _registry

from loop_formats.schema import ConfigError
from loop_recipes.engine import cuda_layers, flash_attention
from loop_recipes.engine.flash_attention import largest_error, use_attention
from support.learner_cases import flash_attention as on_cpu
from support.learner_cases import tiny_lora_model
from support.texts import texts_beside

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
TEXTS = texts_beside(__file__)
KERNELS = TEXTS["kernels"]
COMPILED = TEXTS["compiled"]
"""Each count is of kernels that the process has compiled until then; odd rows are as ranks that share one have them."""


@pytest.fixture(autouse=True)
def _as_it_was():
    flash_attention._kernels.cache_clear()
    with mock.patch.dict(sys.modules), mock.patch.dict(_registry._FLASH_ATTENTION_IMPLS):
        yield
    flash_attention._kernels.cache_clear()
    if _registry.current_flash_attention_impl() is not None:
        _registry.restore_flash_attention_impl()


@pytest.fixture
def hopper(monkeypatch):
    """A device of capability 9.0, as far as this module asks; it computes on the CPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(flash_attention, "activate", lambda: None)
    monkeypatch.setattr(flash_attention, "TRIED", ((9, tiny_lora_model(True).layers[0].attn.head_dim),))
    return monkeypatch


def reason(choice="fa4", device=CUDA, dtype=BF16):
    with pytest.raises(ConfigError) as error:
        use_attention(choice, tiny_lora_model(True), device, dtype)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_auto_tries_the_kernels_where_they_have_been_run_and_fa2_nowhere(hopper):
    compared = []
    hopper.setattr(flash_attention, "largest_error", lambda *args: compared.append(args) or 0.004)
    for choice, capability in (("fa2", (9, 0)), ("auto", (10, 0)), ("auto", (8, 0))):
        hopper.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        use_attention(choice, tiny_lora_model(True), CUDA, BF16)
    assert not compared
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    use_attention("auto", tiny_lora_model(True), CUDA, BF16)
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    use_attention("fa4", tiny_lora_model(True), CUDA, BF16)
    assert len(compared) == 2
    hopper.setattr(flash_attention, "TRIED", ((9, 128),))
    hopper.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    use_attention("auto", tiny_lora_model(True), CUDA, BF16)
    assert len(compared) == 2


def test_where_it_cannot_be_had_the_reason_is_one_line(monkeypatch):
    said = reason(dtype=torch.float32)
    assert said.startswith("attention is fa4, but FlashAttention-4 computes in half precision on CUDA, not in torch.fl")
    assert "not in torch.bfloat16 on cpu; give attention: fa2" in reason(device=CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "this GPU has compute capability 8.0, and FlashAttention-4 is for 9.x and 10.x" in reason()


def test_kernels_that_compute_wrongly_are_refused_and_auto_goes_back_with_a_warning(hopper):
    model = tiny_lora_model(True)
    hopper.setattr(flash_attention, "largest_error", lambda *args: 0.004)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for choice in ("auto", "fa4"):
            use_attention(choice, model, CUDA, BF16)
    for wrong in (0.5, float("nan")):
        hopper.setattr(flash_attention, "largest_error", lambda *args, wrong=wrong: wrong)
        assert "are wrong by" in reason()
        with pytest.warns(UserWarning, match="attention is FlashAttention-2, not 4: its kernels are wrong") as said:
            use_attention("auto", model, CUDA, BF16)
        assert len(said) == 1


def test_a_compiler_that_fails_is_one_line_and_auto_on_other_devices_says_nothing(hopper):
    def fails(*args):
        raise AssertionError("no such tile\nand a long story")

    hopper.setattr(flash_attention, "largest_error", fails)
    assert reason().endswith("fail: AssertionError: no such tile; give attention: fa2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_attention("auto", tiny_lora_model(True), CPU, torch.float32)
        hopper.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        use_attention("auto", tiny_lora_model(True), CUDA, BF16)


@pytest.mark.parametrize("heads", [(8, 2, 16), (6, 1, 64), (12, 2, 128)])
def test_the_comparison_lets_rounding_pass_and_sees_what_is_wrong(monkeypatch, heads):
    def over_borders(q, k, v, borders, seen, *rest, **options):
        keys = int(seen[-1])
        return on_cpu(q, k, v, borders[[0, -1]], seen[[0, -1]], keys, keys, (-1, 0), True)

    def from_the_start(q, k, v, borders, seen, *rest, **options):
        """Where a piece's queries are taken for the first of its keys."""
        apart = zip(*(x.split(at.diff().tolist()) for x, at in ((q, borders), (k, seen), (v, seen))), strict=True)
        first = [(x, *(y[: len(x)] for y in keys)) for x, *keys in apart]
        q, k, v = (torch.cat(pieces) for pieces in zip(*first, strict=True))
        return on_cpu(q, k, v, borders, borders, int(borders.diff().max()), 0, **options)

    def other_heads(q, k, v, *rest, **options):
        return on_cpu(q.flip(1), k, v, *rest, **options).flip(1)

    monkeypatch.setattr(cuda_layers, "varlen_attn", on_cpu)
    assert largest_error(heads, CPU, torch.float32) < 1e-6  # since torch 2.15 the two have kernels of their own
    assert 0 < largest_error(heads, CPU, BF16) < flash_attention.LARGEST_ERROR / 2
    for wrong in (over_borders, from_the_start):
        monkeypatch.setattr(cuda_layers, "varlen_attn", wrong)
        assert largest_error(heads, CPU, BF16) > 5 * flash_attention.LARGEST_ERROR
    if heads[1] > 1:
        monkeypatch.setattr(cuda_layers, "varlen_attn", other_heads)
        assert largest_error(heads, CPU, BF16) > 5 * flash_attention.LARGEST_ERROR


def test_torch_calls_the_kernels_that_are_found_without_vllm_itself(monkeypatch, tmp_path):
    package = tmp_path / "vllm"
    (package / "vllm_flash_attn" / "cute").mkdir(parents=True)
    for folder in (package, package / "vllm_flash_attn"):
        (folder / "__init__.py").write_text("raise AssertionError('all of vLLM')\n")
    (package / "vllm_flash_attn" / "cute" / "__init__.py").touch()
    (package / "vllm_flash_attn" / "cute" / "interface.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    flash_attention.activate()
    assert _registry.current_flash_attention_impl() == "FA4"
    q = mock.Mock()
    kernels = _fa4._fa4_import_module(_fa4._FA4_MODULE_PATH)
    assert kernels is flash_attention
    assert kernels._flash_attn_fwd(q, q, q, causal=True) == ("out", "lse")
    assert kernels._flash_attn_bwd(q, q, q, q, q, q) == ("dq", "dk", "dv")


@pytest.mark.drill
@pytest.mark.parametrize("capability", ["90", "100"])
def test_kernels_are_compiled_once_for_all_lengths(capability):
    """Compiled for a GPU that need not be here; nothing runs."""
    wheel = importlib.util.find_spec("vllm")
    folders = [] if wheel is None else wheel.submodule_search_locations
    if not any((Path(folder) / "vllm_flash_attn/cute/interface.py").is_file() for folder in folders):
        pytest.skip("needs vLLM's wheel for CUDA")
    chosen = {"FLASH_ATTENTION_ARCH": f"sm_{capability}", "CUTE_DSL_ARCH": f"sm_{capability}a"}
    environment = os.environ | chosen | {"FLASH_ATTENTION_NUM_SMS": "132", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMPILED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    first = found["counts"][0]
    assert min(first) >= 1
    assert found["counts"] == [first] * len(found["counts"])
    assert found["vllm"] is None, "vLLM's own __init__ has not run"
