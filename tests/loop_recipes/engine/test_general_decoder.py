"""Models that transformers builds: exact in packed rows, by transformers and PEFT one sequence at a time."""

import itertools
import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from transformers import AttentionInterface
from transformers.integrations import mxfp4
from transformers.models.qwen3_5 import modeling_qwen3_5

import loop_appworld
from loop_formats.schema import ConfigError
from loop_recipes.engine import delta_rule, general_attention, sharding
from loop_recipes.engine import general_decoder as general_decoder_module
from loop_recipes.engine.batching import collate_step
from loop_recipes.engine.general_decoder import built, read_weights
from loop_recipes.engine.general_probe import probe
from loop_recipes.engine.model import check_built, check_shared, meta_model
from loop_recipes.engine.peft_export import load_adapter
from loop_recipes.engine.process_group import FromMainRank
from loop_recipes.engine.sharding import ATTENTION, compile_each_layer
from loop_recipes.plan.job_check import probe_model
from loop_recipes.plan.report import Problem
from model_families.base_model import BaseModel
from model_families.families.general_model import COMPARED
from model_families.opening import open_weights
from rollout_server.policies.adapter_check import check_adapter
from support import tiny_models
from support.families import section
from support.general_models import adapted, exported, ours, samples_of, theirs
from support.learner_cases import flash_attention, make_samples
from support.mxfp4 import write_mxfp4
from support.on_cuda import CountedCalls, as_on_cuda
from support.small_runs import replay_config, set_up, write_logs
from support.texts import texts_beside
from support.tiny_models import KINDS, SEVERAL, write_random

TABLES = texts_beside(__file__)

EXACT, GRADIENT = 1e-5, 2e-5


@pytest.fixture(autouse=True)
def quiet():
    from transformers.utils import logging

    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


def test_what_is_called_compared_is_compared_here():
    assert set(KINDS) | set(SEVERAL) == COMPARED


@pytest.mark.parametrize("kind", [*KINDS, *SEVERAL])
def test_table_packed_shared_and_served_names(kind, tmp_path):
    """The learner's numbers are those of transformers with PEFT on the exported adapter, which a node takes."""
    folder = write_random(kind, tmp_path / "model")
    model = adapted(folder)
    adapter = exported(model, tmp_path / "adapter", folder)
    check_adapter(adapter, BaseModel.read(folder), rank_limit=4)
    for shared in (False, True):
        samples = samples_of(shared)
        reference = theirs(folder, adapter, samples)
        logprobs, gradients = ours(model, samples, packed=True).error(reference)
        assert logprobs < EXACT
        assert gradients < GRADIENT
    assert ours(model, samples_of(), packed=False).error(theirs(folder, adapter, samples_of()))[0] < EXACT
    own = {name: p.detach() for name, p in model.named_parameters() if ".lora_" in name}
    read = load_adapter(adapter, model)
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], own[name]) for name in own)


@pytest.mark.parametrize("kind", ["gemma2", "glm4_moe", "qwen3_5_text", "granitemoehybrid"])
def test_layers_that_are_computed_again_have_their_own_row(kind, tmp_path):
    folder = write_random(kind, tmp_path)
    plain, again = (adapted(folder, activation_checkpointing=on) for on in (False, True))
    one, other = samples_of(), samples_of(shared=True)
    found = []
    for model in (plain, again):
        batches = [collate_step(samples, 0, True) for samples in (one, other)]
        total = sum(model(**batch.inputs()).logprobs.sum() for batch in batches)
        total.backward()  # the first row's layers are computed again after the second's
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == len(found[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "graphs"), [("gpt_oss", 11), ("lfm2", 12)])
def test_other_rows_need_no_further_graphs(kind, graphs, tmp_path):
    """Attention and mixers are left to run as they are, so that a layer is compiled around them."""
    torch._dynamo.reset()
    model, counter, counts = adapted(write_random(kind, tmp_path)), CompileCounter(), []
    compile_each_layer(model, counter)
    for samples in (make_samples([31, 9]), make_samples([17, 8, 40]), samples_of(shared=True)):
        batch = collate_step(samples, 0, packed=True)
        with torch.no_grad():
            model(**batch.inputs())
        model(**batch.inputs()).logprobs.sum().backward()
        counts.append(counter.frame_count)
    assert counts == [graphs] * len(counts)


def test_blocks_of_queries_are_the_whole(tmp_path, monkeypatch):
    folder = write_random("gpt_oss", tmp_path)
    model = adapted(folder)
    whole = ours(model, samples_of(), packed=True)
    monkeypatch.setattr(general_attention, "BLOCK_QUERIES", 7)
    assert max(ours(model, samples_of(), packed=True).error(whole)) < 1e-5


@pytest.mark.parametrize("kind", ["gemma3_text", "granite", "gemma4_text"])
def test_the_path_of_cuda_has_windows_and_scales(kind, tmp_path):
    model = adapted(write_random(kind, tmp_path))
    for shared in (False, True):
        samples = samples_of(shared)
        expected = ours(model, samples, packed=True)
        with as_on_cuda(varlen_attn=flash_attention):
            found = ours(model, samples, packed=True)
        logprobs, gradients = found.error(expected)
        assert (logprobs < EXACT, gradients < GRADIENT) == (True, True)


class Fla:
    """flash-linear-attention 0.6's operator with its signature, by the definition."""

    def __init__(self, heeds_bounds=True):
        self.heeds_bounds, self.rows = heeds_bounds, []

    def chunk_gated_delta_rule(
        self,
        q,
        k,
        v,
        g,
        beta,
        scale=None,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        use_beta_sigmoid_in_kernel=False,
        allow_neg_eigval=False,
        state_v_first=False,
        cu_seqlens=None,
        cu_seqlens_cpu=None,
        chunk_indices=None,
        cp_context=None,
        **kwargs,
    ):
        assert (q.shape[0], kwargs) == (1, {})
        assert initial_state is None
        bounds = [0, q.shape[1]] if cu_seqlens is None or not self.heeds_bounds else cu_seqlens.tolist()
        assert (bounds[0], bounds[-1]) == (0, q.shape[1])
        self.rows.append(len(bounds) - 1)
        rule = modeling_qwen3_5.torch_chunk_gated_delta_rule.reference
        cut = ((x[:, begin:end] for x in (q, k, v, g, beta)) for begin, end in itertools.pairwise(bounds))
        done = [rule(*own, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)[0] for own in cut]
        return torch.cat(done, 1), None

    def of_old(self, q, k, v, g, beta, use_qk_l2norm_in_kernel=False, output_final_state=False, initial_state=None):
        """The same before it took bounds."""
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "initial_state": initial_state}
        return self.chunk_gated_delta_rule(q, k, v, g, beta, output_final_state=output_final_state, **options)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"])
def test_a_kernel_that_takes_bounds_has_a_packed_row_in_one_call(kind, shared, tmp_path, monkeypatch):
    """A stand-in: it runs on CUDA alone. With one that looks past the bounds the answer is another."""
    model, samples = adapted(write_random(kind, tmp_path)), samples_of(shared)
    expected, mixers = ours(model, samples, packed=True), len(model.mixers)
    documents = collate_step(samples, 0, packed=True).documents
    pieces = len(documents.lengths)
    monkeypatch.setattr(delta_rule, "on_cuda", lambda x: True)
    of_old, one_call, leaking = Fla(), Fla(), Fla(heeds_bounds=False)
    kernels = {
        of_old: of_old.of_old,
        one_call: one_call.chunk_gated_delta_rule,
        leaking: leaking.chunk_gated_delta_rule,
    }
    errors = {}
    for fla, kernel in kernels.items():
        monkeypatch.setattr(delta_rule, "kernel", lambda kernel=kernel: kernel)
        logprobs, gradients = ours(model, samples, packed=True).error(expected)
        errors[fla] = logprobs < EXACT and gradients < GRADIENT
    assert list(errors.values()) == [True, True, False]
    assert of_old.rows == [1] * (pieces * mixers)
    assert one_call.rows == [pieces] * mixers


@pytest.mark.parametrize("mode", [True, False])
def test_all_but_loras_dropout_stays_in_evaluation(mode, tmp_path):
    model = adapted(write_random("granitemoehybrid", tmp_path))
    model.train(mode)
    training = {type(module).__name__ for module in model.modules() if module.training}
    assert training == ({"GeneralDecoder", "FoldedLoRALinear", "Identity", "Linear"} if mode else set())


def test_a_kind_that_nobody_compared_is_taken_with_a_key(tmp_path):
    from transformers import StableLmConfig, StableLmForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    StableLmForCausalLM(StableLmConfig(vocab_size=97, **sizes)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no test compares models of the kind stablelm .*; model.untried=True takes"):
        meta_model(section(tmp_path), torch.float32)
    assert meta_model(section(tmp_path, untried=True), torch.float32).base.model_type == "stablelm"
    with pytest.raises(ValueError, match="LoRA goes on every linear layer of a stablelm"):
        meta_model(section(tmp_path, untried=True, apply_lora_to_mlp=False), torch.float32)


def probed(folder, dtype=torch.float32, context=None):
    base = replace(BaseModel.read(folder), context=context)
    weights, buffers = read_weights(str(folder), base, dtype)
    return probe(str(folder), base, weights | buffers, dtype, torch.device("cpu"))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "lfm2", "gemma4", "deepseek_v3"])
def test_the_first_look_says_how_exact_a_model_is(kind, tmp_path):
    found = probed(write_random(kind, tmp_path))
    assert found.error < EXACT
    assert str(found).startswith("the model's first 2 layers give log-probs within ")


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 30}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0]}
ALONE = pytest.mark.fault("a sequence is computed otherwise beside longer ones, or than the server computes it")


@ALONE
@pytest.mark.parametrize("context", [30, 31, None])
@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("phi3", LONG),
        ("llama", LONG),
        ("phimoe", LONG | {"short_mscale": 1.1, "long_mscale": 1.3}),
        ("hunyuan_v1_dense", {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0, "rope_theta": 1e4}),
        ("seed_oss", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
        ("ministral3", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "llama_4_scaling_beta": 0.5}),
    ],
)
def test_positions_are_those_of_the_server_whatever_else_is_in_the_row(kind, rope, context, tmp_path, monkeypatch):
    """vLLM takes one of two sets of factors for all sequences, by the length that it serves; transformers takes them
    anew for each row."""
    monkeypatch.setattr(general_decoder_module, "COMPARED", COMPARED | {kind})
    changes = {"sliding_window": None, "original_max_position_embeddings": 30, "rope_parameters": rope}
    folder = write_random(kind, tmp_path / "model", head_dim=8, **changes)
    model, samples = adapted(folder, context=context), make_samples([60, 20, 31, 25])
    sides = (context == 30, context != 30) if "short_factor" in rope else (True, True)
    assert (30 in model.contexts, 31 in model.contexts) == sides
    whole = ours(model, samples, packed=True).logprobs
    assert (ours(model, samples, packed=False).logprobs - whole).abs().max() < EXACT
    alone = [ours(model, [sample], packed=True).logprobs for sample in samples]
    assert (torch.cat(alone) - whole).abs().max() < EXACT
    assert probed(folder, context=context).error < 1e-4
    if kind != "phimoe":  # whose long factors transformers 5.19 never reads
        same = [n for n, one in enumerate(samples) if rope is not LONG or (one.tokens > 30) == (context != 30)]
        adapter = exported(model, tmp_path / "adapter", folder)
        expected = theirs(folder, adapter, [samples[n] for n in same]).logprobs
        assert (torch.cat([alone[n] for n in same]) - expected).abs().max() < EXACT


@ALONE
def test_the_first_look_is_longer_than_what_changes_at_a_length(tmp_path):
    lengths = {"attention_chunk_size": 8192, "floor_scale": 8192, "rope_parameters": LONG}
    folder = write_random("llama4_text", tmp_path, num_local_experts=2, head_dim=8, **lengths)
    config = built(str(folder), BaseModel.read(folder), "eager", 16).config
    assert (config.attention_chunk_size, config.floor_scale, config.num_local_experts) == (16, 16, 2)
    assert config.rope_parameters["original_max_position_embeddings"] == 16


def _ignores(name):
    """An attention that leaves out an argument."""
    return lambda *args, **options: general_attention.attention(*args, **{**options, name: None})


def _leak(monkeypatch):
    monkeypatch.setattr(general_decoder_module, "_by_document", lambda mixer: None)


@pytest.mark.parametrize(("kind", "wrong", "where"), TABLES["the_first_look_refuses_what_is_not_exact"])
def test_the_first_look_refuses_what_is_not_exact(kind, wrong, where, tmp_path, monkeypatch):
    if wrong is None:
        _leak(monkeypatch)
    else:
        monkeypatch.setitem(AttentionInterface._global_mapping, general_attention.ATTENTION_NAME, _ignores(wrong))
    folder = write_random(kind, tmp_path)
    with pytest.raises(ValueError, match=rf"log-probs {where} differ from transformers' own by \d.* nats"):
        probed(folder)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3_moe", "lfm2", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_first_look_in_half_precision_is_held_to_the_models_own_rounding(kind, dtype, tmp_path):
    found = probed(write_random(kind, tmp_path), dtype)
    assert found.error < 1e-4, "in fp32, of the weights as they are rounded"
    assert found.packed < found.rounding / 5
    assert "rounding to half precision moves them by" in str(found)


@pytest.mark.parametrize(("kind", "wrong"), [("gemma3_text", "window"), ("gpt_oss", "sinks"), ("gemma2", "cap")])
def test_rows_that_are_packed_wrongly_in_half_precision_alone_are_refused(kind, wrong, tmp_path, monkeypatch):
    """As by a kernel for CUDA that passes something over."""
    right = general_attention._packed

    def packed(q, k, v, documents, scale, window, cap, sinks):
        others = {"window": window, "cap": cap, "sinks": sinks}
        return right(q, k, v, documents, scale, **(others if q.dtype == torch.float32 else {**others, wrong: None}))

    monkeypatch.setattr(general_attention, "_packed", packed)
    folder = write_random(kind, tmp_path)
    assert probed(folder).error < EXACT
    with pytest.raises(
        ValueError, match=r"in bfloat16 log-probs in a packed row are \S+ nats from those one sequence at"
    ):
        probed(folder, torch.bfloat16)


INDEXED = tiny_models.KINDS["deepseek_v3"] | {"index_topk": 16}


@pytest.mark.fault("a model of a kind that nobody tried ends in a traceback, or is called what it is not")
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("gpt2", {}, "cannot be read as that of a decoder known here: KeyError"),
        ("nemotron_h", {}, "cannot be read as that of a decoder known here: KeyError"),
        ("phi", {}, "the head of PhiForCausalLM has a bias, which is not computed here"),
        ("deepseek_v32", INDEXED, "models of the kind deepseek_v32 cannot be computed here (TypeError: "),
        ("recurrent_gemma", {}, "models of the kind recurrent_gemma cannot be computed here (RuntimeError: "),
        ("llama4_text", {}, "Llama4ForCausalLM keeps its layers elsewhere than decoders that are known here"),
    ],
)
def test_a_decoder_of_another_shape_is_one_line(kind, changes, said, tmp_path):
    found = probe_model(str(write_random(kind, tmp_path, **changes)), 512)
    assert isinstance(found, Problem)
    assert said in found.text
    assert "\n" not in found.text


@pytest.mark.parametrize(("change", "said"), [("lost", "lacks the weight"), ("more", "has no place for the weight")])
def test_weights_that_are_not_the_models_are_one_line(change, said, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = write_random("smollm3", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    if change == "lost":
        del weights["model.norm.weight"]
    else:
        weights["model.layers.0.extra.weight"] = torch.ones(3)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        adapted(folder)


def test_kernels_that_it_does_not_take_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="attention is fa4, which is for models of torchtune's modules: give fa2"):
        adapted(write_random("smollm3", tmp_path), attention="fa4")


def test_code_in_a_folder_is_not_run_and_nobody_is_asked(tmp_path, monkeypatch):
    folder = write_random("smollm3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "brand_new",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text("raise SystemExit('ran')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=r"^model: \S+ cannot be built: transformers \S+ does not know a model"):
        meta_model(section(folder, untried=True), torch.float32)


def test_ranks_share_no_row_of_a_hybrid(tmp_path):
    hybrid = meta_model(section(write_random("lfm2", tmp_path / "lfm2")), torch.float32)
    check_shared(hybrid, 1)
    with pytest.raises(
        ConfigError, match="sequence_parallel is 2, and the layers of a lfm2 have a state along the row"
    ):
        check_shared(hybrid, 2)
    check_shared(meta_model(section(write_random("smollm3", tmp_path / "smollm3")), torch.float32), 2)


def test_what_rank_0_read_is_a_mapping_of_names():
    tensors, read = {"a": torch.ones(2), "b": torch.zeros(1)}, []
    given = FromMainRank(lambda: read.append(1) or tensors)
    assert read == []
    assert list(given) == ["a", "b"]
    assert len(given) == 2
    assert given["a"] is tensors["a"]
    assert read == [1]


@pytest.mark.fault("gpt-oss is read for minutes before the node is started, which then takes its own minutes")
def test_weights_that_transformers_reads_are_read_while_the_node_starts(published, tmp_path, monkeypatch):
    folder, _ = published
    events = []
    for module, name in ((loop_appworld, "open_source"), (general_decoder_module, "read_weights")):
        done = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, n=name, do=done: events.append(n) or do(*args))
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1, model=section(folder), checkpointer=None))
    write_logs(tmp_path / "logs", 1, 97)
    with set_up(loop_appworld.LoopAppWorldRecipe(cfg)):
        assert events == ["open_source", "read_weights"]


@pytest.fixture
def published(tmp_path):
    """A gpt-oss in MXFP4, and its experts."""
    return tmp_path / "model", write_mxfp4(tmp_path / "model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_is_read_bit_for_bit(published, dtype):
    """By the definition of the format, and by transformers' own function."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    folder, experts = published
    base = open_weights(folder)
    weights, _ = read_weights(str(folder), base, dtype)
    stored = load_file(folder / "model.safetensors")
    assert len(experts) == 4
    for name, expected in experts.items():
        found = weights["text." + name.removeprefix("model.")]
        assert found.dtype == dtype
        assert torch.equal(found.float(), expected)
        theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
        assert torch.equal(found.bfloat16(), theirs)
        assert base.weights[name] == tuple(expected.transpose(1, 2).shape)


def test_the_learner_of_mxfp4_is_that_of_its_copy_in_bf16(published, tmp_path):
    """Log-probs, and the names of its adapter; the first look passes."""
    folder, experts = published
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    kept = {name: t for name, t in load_file(folder / "model.safetensors").items() if t.dtype != torch.uint8}
    save_file(kept | {name: t.bfloat16().contiguous() for name, t in experts.items()}, copy / "model.safetensors")
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    one, other = adapted(folder), adapted(copy)
    found, expected = (ours(model, samples_of(), packed=True) for model in (one, other))
    assert found.error(expected) == (0.0, 0.0)
    check_adapter(exported(one, tmp_path / "adapter", folder), BaseModel.read(folder), rank_limit=4)
    weights, buffers = read_weights(str(folder), one.base, torch.float32)
    assert probe(str(folder), one.base, weights | buffers, torch.float32, torch.device("cpu")).error < EXACT


def test_blocks_without_their_scales_are_one_line(published):
    folder, _ = published
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^\S+: model\.layers\.1\S+\.down_proj_blocks has no scale for each block"):
        BaseModel.read(folder)


@pytest.mark.fault("gpt-oss-20b is read for eight minutes by one thread of a machine that has many")
def test_mxfp4_is_read_by_all_threads_of_the_machine(published, monkeypatch):
    folder, _ = published
    threads, before = [], torch.get_num_threads()
    convert = mxfp4._convert_moe_packed_tensors

    def counted(*args, **kwargs):
        threads.append(torch.get_num_threads())
        return convert(*args, **kwargs)

    monkeypatch.setattr(mxfp4, "_convert_moe_packed_tensors", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    try:
        torch.set_num_threads(1)  # as torchrun has it
        read_weights(str(folder), open_weights(folder), torch.bfloat16)
        assert threads == [3] * 4
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


KEEPS = {"gpt_oss": (2, 2), "qwen3_moe": (2, 2), "falcon_h1": (2, 2), "deepseek_v3": (2, 2)}
KEEPS |= {"qwen3_5_text": (1, 2), "lfm2": (1, 2), "granitemoehybrid": (1, 2), "gemma2": (2, 2)}


@pytest.mark.fault("keep_attention looks at all operations of layers that have no attention, and is planned for them")
@pytest.mark.parametrize("kind", KEEPS)
def test_only_layers_with_attention_keep_it(kind, tmp_path, monkeypatch):
    folder = write_random(kind, tmp_path / "model")
    having, layers = KEEPS[kind]
    looked, found = [], {}
    contexts = sharding.create_selective_checkpoint_contexts
    monkeypatch.setattr(
        sharding, "create_selective_checkpoint_contexts", lambda kept: looked.append(1) or contexts(kept)
    )
    for keep in (False, True):
        model = adapted(folder, activation_checkpointing=True, keep_attention=keep)
        with CountedCalls(*ATTENTION) as calls:
            found[keep] = ours(model, samples_of(), packed=True), calls.calls
    assert len(model.layers) == layers
    assert sum(looked) == having
    assert len(BaseModel.read(folder, general=True).attention_layers) == having
    again, kept = (found[keep][1] for keep in (False, True))
    assert again == 2 * kept, "what is kept is not computed again"
    assert kept > 0 or kind in ("gemma2", "deepseek_v3")  # capped; by no kernel of a CPU
    assert found[True][0].error(found[False][0]) == (0.0, 0.0)


@pytest.mark.parametrize(("kind", "keeps"), [("gemma2", False), ("gpt_oss", True), ("lfm2", True)])
def test_keeping_attention_that_leaves_nothing_to_keep_is_refused(kind, keeps, tmp_path):
    folder = write_random(kind, tmp_path / "model")
    model, config = adapted(folder), SimpleNamespace(keep_attention=True)
    with nullcontext() if keeps else pytest.raises(ConfigError, match=r"^keep_attention keeps nothing of a gemma2, "):
        check_built(model, model.base, config)
