"""One line for each thing that can be wrong with a machine's devices, shown without a GPU."""

import os

import pytest
import torch

from loop_formats.schema import ConfigError
from loop_recipes.engine import device_check
from loop_recipes.engine.device_check import check_matmul, training_device
from support.device_ranks import wait_in_vain
from support.ranks import on_ranks


@pytest.fixture
def cuda(monkeypatch):
    """A machine with one GPU of capability 9.0, as far as the checks ask; returns what they set up, in order."""
    called = []
    for name in device_check.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", called.append)
    monkeypatch.setattr("torchtune.utils.get_device", lambda name: called.append(name) or torch.device(name))
    monkeypatch.setattr(device_check, "check_matmul", lambda *_: None)
    return called


def too_old():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).\nPlease update it")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("init", too_old, r"^device: CUDA cannot be used: .* \(found version 11040\)\.; look"),
        ("device_count", lambda: 0, "torch finds no GPU"),
        ("device_count", lambda: 4, "8 ranks on this machine need as many GPUs, and torch finds 4; lower --nproc"),
        ("get_device_capability", lambda _: (7, 5), r"capability 7\.5; bf16 and flash attention need 8\.0"),
    ],
)
def test_a_gpu_that_cannot_train_is_one_line(cuda, monkeypatch, name, found, message):
    monkeypatch.setattr(torch.cuda, name, found)
    monkeypatch.setattr(device_check, "launched", lambda *_: 8 if "8 ranks" in message else 1)
    with pytest.raises(ConfigError, match=message):
        training_device("cuda")


@pytest.mark.slow
@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is a CUDA build")
def test_a_cpu_build_says_how_to_get_the_other():
    with pytest.raises(ConfigError, match="CPU build here; install the CUDA one with `make setup GPU=1`"):
        training_device("cuda")


@pytest.mark.slow
@pytest.mark.parametrize("own", [None, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_allocator_is_set_before_anything_is_on_the_gpu_unless_a_user_did(cuda, monkeypatch, own):
    if own:
        monkeypatch.setenv(own, "max_split_size_mb:512")
    training_device("cuda")
    assert cuda == ["cuda"] if own else ["expandable_segments:True,pinned_max_round_threshold_mb:1", "cuda"]
    assert not any(name in os.environ for name in device_check.ALLOCATOR_VARIABLES if name != own), "for this process"


@pytest.mark.slow
def test_every_dtype_is_tried_on_the_device(monkeypatch):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert training_device("cpu", dtype) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"cannot multiply matrices in torch\.uint16"):
        check_matmul(torch.device("cpu"), torch.uint16)
    monkeypatch.setattr(device_check.torch, "ones", torch.zeros)
    with pytest.raises(ConfigError, match=r"multiplies matrices in torch\.float32 wrongly"):
        check_matmul(torch.device("cpu"), torch.float32)


@pytest.mark.slow
@pytest.mark.integration
def test_two_ranks_add_up_and_one_that_does_not_come_is_named_in_time():
    said = on_ranks(2, wait_in_vain)
    assert said["error"].startswith("2 ranks could not add up a number over cpu")
    assert "look for a rank that has ended" in said["error"]
    assert said["seconds"] < 60
