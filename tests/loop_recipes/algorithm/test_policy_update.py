"""An update: exact entropy, losses that are not finite, half precision and its loss scale."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from peft import PeftModel
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from loop_appworld import LoopAppWorldRecipe
from loop_formats.run_files import read_rollouts
from loop_formats.schema import ConfigError
from loop_recipes.algorithm import policy_update
from loop_recipes.algorithm.advantages import LeaveOneOut, ReturnToGo
from loop_recipes.algorithm.losses import ClippedPolicyLoss
from loop_recipes.algorithm.policy_update import NonFiniteLoss
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.engine.checkpoint import load_training_state
from loop_recipes.engine.model import DTYPES
from loop_recipes.engine.sharding import clip_grad_norm
from support.small_runs import in_sequences, replay_config, set_up, train

CRITIC = "credit.critic._component_=loop_recipes.algorithm.critic.Critic"


def run(config: Path, *overrides: str) -> list[dict]:
    """Trains in this process; returns the lines of its metrics."""
    cfg = OmegaConf.merge(OmegaConf.load(config), OmegaConf.from_dotlist(list(overrides)))
    train(cfg)
    return [json.loads(line) for line in Path(cfg.output_dir, "metrics.jsonl").read_text().splitlines()]


def test_cross_entropy_is_the_mean_over_a_minibatchs_tokens(tmp_path):
    """The first step of expert iteration, before anything is learned: -log p of the solved rollouts under the base."""
    config = replay_config(
        tmp_path,
        iterations=1,
        advantage={"_component_": "loop_recipes.algorithm.advantages.Solved"},
        loss={"_component_": "loop_recipes.algorithm.losses.LogLikelihood"},
        update={"minibatch_rollouts": None, "loss_divisor": "tokens", "micro_batch_tokens": 150},
    )
    (line,) = run(config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    logprobs = []
    for text in (tmp_path / "logs/made-up-i0001.jsonl").read_text().splitlines():
        rollout = json.loads(text)
        if rollout["reward"] == 1.0:
            logprobs.append(logprobs_by_hand(model, rollout))
    assert line["steps"] == 1
    assert line["kept_fraction"] == len(logprobs) / 12
    assert line["loss"] == pytest.approx(-torch.cat(logprobs).mean().item(), rel=1e-5)


@pytest.mark.fault("tokens a second of sequences that begin alike")
def test_tokens_a_second_are_those_that_were_computed(tmp_path):
    """Each turn in a sequence of its own, which begins as the one before: the longest of an episode is computed."""
    config = replay_config(tmp_path, iterations=1)
    [log] = (tmp_path / "logs").glob("*.jsonl")
    whole = read_rollouts(log)
    log.write_text("".join(f"{part.to_json()}\n" for rollout in whole for part in in_sequences(rollout)))
    [line] = run(config, "update.packed=True", "update.micro_batch_tokens=4000", "update.min_abs_advantage=0.0")
    computed = 2 * sum(rollout.turns[-1].end for rollout in whole)
    assert line["tokens_per_second"] * line["seconds_updating"] == pytest.approx(computed)


def test_an_episode_trains_the_same_in_one_sequence_and_in_several(tmp_path):
    """Each turn of some episodes in a sequence of its own, after the same ids: the same advantages, loss and step."""
    config = replay_config(tmp_path, iterations=1)
    [log] = (tmp_path / "logs").glob("*.jsonl")
    whole = read_rollouts(log)
    split = [part for n, rollout in enumerate(whole) for part in (in_sequences(rollout) if n % 2 else [rollout])]
    adapters, lines = {}, {}
    for name, rollouts in (("whole", whole), ("split", split)):
        log.write_text("".join(f"{rollout.to_json()}\n" for rollout in rollouts))
        [lines[name]] = run(config, f"output_dir={tmp_path / name}", "update.minibatch_rollouts=4")
        adapters[name] = load_file(tmp_path / name / "policies/policy-v0001/adapter_model.safetensors")
    for key in ("rollouts", "reward", "success", "turns", "sampled_tokens", "kept_fraction", "advantage_std", "steps"):
        assert lines["split"][key] == pytest.approx(lines["whole"][key]), key
    for key in ("loss", "grad_norm", "clip_fraction", "approx_kl"):
        assert lines["split"][key] == pytest.approx(lines["whole"][key], rel=1e-4, abs=1e-7), key
    assert (lines["whole"]["sequences"], lines["split"]["sequences"]) == (1.0, len(split) / len(whole))
    for name, tensor in adapters["whole"].items():
        torch.testing.assert_close(adapters["split"][name], tensor, rtol=1e-3, atol=1e-6)


def entropy_by_hand(folder, iteration):
    """Of the base model at the sampled tokens of rollouts with signal, from all logits, float64."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    log = folder / "logs" / f"made-up-i{iteration:04d}.jsonl"
    rollouts = [json.loads(line) for line in log.read_text().splitlines()]
    rewards = torch.tensor([rollout["reward"] for rollout in rollouts])
    groups = torch.tensor([int(rollout["task_id"][-1]) for rollout in rollouts])
    entropies = []
    for rollout, advantage in zip(rollouts, LeaveOneOut()(rewards, groups).tolist(), strict=True):
        if abs(advantage) >= 0.01:
            with torch.no_grad():
                logits = model(torch.tensor([rollout["token_ids"]])).logits[0, :-1]
            sampled = torch.tensor(rollout["mask"][1:], dtype=torch.bool)
            entropies.append(torch.distributions.Categorical(logits=logits).entropy()[sampled])
    return torch.cat(entropies).mean().item()


def test_the_entropy_is_that_of_the_policy_that_sampled(tmp_path):
    """A fresh adapter changes nothing, so version 0 is the base model; the second iteration trains on it too."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=2, stale_by=1))
    cfg.collection.max_policy_lag = 1
    train(cfg)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["policy_lag"] for line in lines] == [0, 1]
    for line in lines:
        assert line["entropy"] == pytest.approx(entropy_by_hand(tmp_path, line["iteration"]), rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_run_before_the_step(tmp_path):
    config = replay_config(tmp_path, iterations=2)
    cfg = OmegaConf.load(config)
    recipe = LoopAppWorldRecipe(cfg)
    with set_up(recipe):
        name, parameter = next(iter(recipe._learner.parameters.items()))
        before = {other: tensor.detach().clone() for other, tensor in recipe._learner.parameters.items()}
        with torch.no_grad():
            parameter[0, 0] = float("nan")
        with pytest.raises(NonFiniteLoss, match="the step was not taken"):
            recipe.train()
    for other, tensor in recipe._learner.parameters.items():
        assert other == name or torch.equal(tensor, before[other])
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_trains_float32_masters_and_serves_its_own_kind(tmp_path, dtype):
    config = replay_config(tmp_path, iterations=2, stress_test=True)
    checkpointing = ("enable_activation_checkpointing=True", "keep_attention=True")
    lines = run(config, f"dtype={dtype}", f"adapter_dtype={dtype}", *checkpointing)
    assert len(lines) == 2
    before, after = (
        load_file(tmp_path / f"run/policies/policy-v000{version}/adapter_model.safetensors") for version in (0, 2)
    )
    assert {tensor.dtype for tensor in after.values()} == {DTYPES[dtype]}
    masters = load_training_state(tmp_path / "run/checkpoints/iteration_0002").adapters[2]
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    assert all(not torch.equal(tensor, tensor.to(DTYPES[dtype]).float()) for tensor in masters.values())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())


RETURNS_TO_GO = {"_component_": "loop_recipes.algorithm.advantages.ReturnToGo"}
KEPT = "keep_attention needs enable_activation_checkpointing: True, and compile"
OFFLOADED = "enable_activation_offloading needs enable_activation_checkpointing: True"
BY_TOKEN = "ReturnToGo gives each token its own; it needs loss.level=token"
GIVEN = "credit.critic must be left out or come first: .* and advantage gives each token its own already"


@pytest.mark.parametrize(
    ("changes", "words", "message"),
    [
        ({}, ["keep_attention=True"], KEPT),
        ({}, ["keep_attention=True", "enable_activation_checkpointing=True", "compile=True"], KEPT),
        ({}, ["enable_activation_offloading=True"], OFFLOADED),
        ({}, ["attention=fa4"], "attention is fa4, which is checked for packed rows alone"),
        ({}, ["attention=fa4", "update.packed=True"], "fa4, but FlashAttention-4 computes in half precision on CUDA"),
        ({"advantage": RETURNS_TO_GO}, ["loss.level=turn"], BY_TOKEN),
        *(
            ({}, [f"loss.level={level}", "update.loss_divisor=tokens"], f"is of a whole {level}; give mean or a")
            for level in ("turn", "trajectory")
        ),
        ({"advantage": RETURNS_TO_GO}, [CRITIC], GIVEN),
    ],
)
def test_what_does_not_go_together_is_refused(tmp_path, changes, words, message):
    with pytest.raises(ConfigError, match=message):
        run(replay_config(tmp_path, iterations=1, **changes), *words)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("backend", "packed"),
    [("aot_eager", True), ("inductor", False), ("inductor", True)],
)
def test_compiled_layers_take_the_same_steps(tmp_path, monkeypatch, backend, packed):
    monkeypatch.setenv("TORCH_COMPILE_BACKEND", backend)  # read by torchtune
    config = replay_config(tmp_path, iterations=2)
    common = (f"update.packed={packed}", "update.micro_batch_tokens=150", "enable_activation_checkpointing=True")
    runs = {
        name: run(config, *common, f"compile={name == 'compiled'}", f"output_dir={tmp_path / name}")
        for name in ("plain", "compiled")
    }
    for plain, compiled in zip(runs["plain"], runs["compiled"], strict=True):
        assert plain["steps"] == compiled["steps"] > 1
        for key in ("loss", "grad_norm", "gap_p99", "ratio_p90"):
            assert compiled[key] == pytest.approx(plain[key], rel=1e-4, abs=1e-6), key


def test_a_scale_that_overflows_is_halved_and_the_same_step_taken_also_after_a_resume(tmp_path, monkeypatch):
    """In fp16 from a scale far too large, and from the usual one: the same numbers up to fp16's rounding."""
    config, runs = replay_config(tmp_path, iterations=2), {}
    for name, scale in (("usual", 2.0**16), ("large", 2.0**40)):
        monkeypatch.setattr(policy_update, "FP16_LOSS_SCALE", scale)
        (runs[name],) = run(config, "dtype=fp16", "max_iterations=1", f"output_dir={tmp_path / name}")
    assert runs["large"]["steps"] == runs["usual"]["steps"] > 1
    for key in ("loss", "grad_norm", "ratio_p90"):
        assert runs["large"][key] == pytest.approx(runs["usual"][key], rel=2e-2, abs=1e-4), key

    def kept(iteration: int) -> float:
        folder = tmp_path / f"large/checkpoints/iteration_{iteration:04d}"
        return load_training_state(folder).state["update"]["loss_scale"]

    reached = kept(1)
    assert 1.0 < reached < 2.0**40
    monkeypatch.setattr(policy_update, "FP16_LOSS_SCALE", 2.0)
    run(config, "dtype=fp16", f"output_dir={tmp_path / 'large'}", "resume_from_checkpoint=True")
    assert 2.0 < kept(2) <= reached, "a resumed run goes on with the scale that the run had found"


def test_a_scale_grows_back_after_steps_without_an_overflow_also_after_a_resume(tmp_path, monkeypatch):
    config = replay_config(tmp_path, iterations=2)
    monkeypatch.setattr(policy_update, "FP16_LOSS_SCALE", 1.0)
    monkeypatch.setattr(policy_update, "FP16_GROWTH_STEPS", 3)
    (first,) = run(config, "dtype=fp16", "max_iterations=1")
    _, second = run(config, "dtype=fp16", "resume_from_checkpoint=True")
    steps = first["steps"] + second["steps"]
    saved = load_training_state(tmp_path / "run/checkpoints/iteration_0002").state["update"]
    assert saved == {"loss_scale": 2.0 ** (steps // 3), "steps_at_loss_scale": steps % 3}


def test_a_trajectory_log_ratio_over_its_limit_ends_the_iterations_steps(tmp_path, monkeypatch):
    """Against the mean over the minibatch of the sum over each rollout's tokens, in float64."""
    forward, seen = ClippedPolicyLoss.forward, []

    def recording(self, logprobs, batch):  # a minibatch is one micro-batch here
        difference = logprobs.detach().double() - batch.old_logprobs.double()
        rollouts = [difference[batch.rollout_index == number].sum() for number in range(len(batch.rewards))]
        seen.append(abs(sum(rollouts) / len(rollouts)).item())
        return forward(self, logprobs, batch)

    monkeypatch.setattr(ClippedPolicyLoss, "forward", recording)
    config = replay_config(tmp_path, iterations=2)
    whole = ["update.micro_batch_tokens=100000", "update.epochs=3", "optimizer.lr=0.01"]
    (free,) = run(config, *whole, "max_iterations=1", f"output_dir={tmp_path / 'free'}")
    without_limit, seen[:] = list(seen), []
    assert len(without_limit) == free["steps"] == 6
    assert free["steps_left_out"] == 0
    limit = (max(without_limit[:3]) + max(without_limit)) / 2
    crossed = next(number for number, value in enumerate(without_limit) if value > limit)

    first, second = run(config, *whole, f"update.max_trajectory_log_ratio={limit}")
    assert seen[: crossed + 1] == without_limit[: crossed + 1]
    assert (first["steps"], first["steps_left_out"]) == (crossed, 6 - crossed)
    assert second["steps"] > 0, "the next iteration trains again"


def test_the_config_decides_how_rollouts_are_cut_into_minibatches(tmp_path):
    """Two epochs on the 10 rollouts with an advantage, in threes: 3 + 3 + 4, or 3 + 3 + 3 + 1."""
    config = replay_config(tmp_path, iterations=1)
    for name, steps in (("even", 6), ("full", 8)):
        output = f"output_dir={tmp_path / name}"
        (line,) = run(config, output, "update.minibatch_rollouts=3", f"update.minibatch_sizes={name}")
        assert line["kept_fraction"] * line["rollouts"] == 10
        assert line["steps"] == steps


def test_each_pass_of_each_iteration_of_each_seed_has_minibatches_of_its_own(tmp_path, monkeypatch):
    """Two passes in each of two iterations, whose rollouts have the same names within their collections."""
    forward, seen = ClippedPolicyLoss.forward, []

    def recording(self, logprobs, batch):  # a minibatch is one micro-batch here
        seen.append(frozenset(name.partition("/")[2] for name in batch.rollout_ids))
        return forward(self, logprobs, batch)

    monkeypatch.setattr(ClippedPolicyLoss, "forward", recording)
    config = replay_config(tmp_path, iterations=2)
    for seed in (0, 1):
        run(config, "update.micro_batch_tokens=100000", f"seed={seed}", f"output_dir={tmp_path / str(seed)}")
    passes = list(zip(seen[::2], seen[1::2], strict=True))
    assert {len(first | second) for first, second in passes} == {10}
    assert len(passes) == len(set(passes)) == 8


def test_an_iteration_whose_first_step_is_forbidden_leaves_the_policy_alone(tmp_path):
    """Its rollouts are of an older version, so that already the first log-ratio is not 0."""
    config = replay_config(tmp_path, iterations=2, stale_by=1)
    first, second = run(config, "collection.max_policy_lag=1", "update.max_trajectory_log_ratio=1e-6")
    assert (first["policy_version"], second["policy_version"]) == (1, 1)
    assert (first["steps"], second["steps"], second["steps_left_out"]) == (1, 0, 4)


@pytest.mark.parametrize("own_limit", [None, 0.01])
def test_the_critics_gradient_is_clipped_with_the_policys_or_by_itself(tmp_path, own_limit):
    """Plain gradient descent moves parameters by the learning rate times the clipped gradient."""
    cfg = OmegaConf.load(replay_config(tmp_path, iterations=1))
    critic = {"_component_": "loop_recipes.algorithm.critic.Critic", "warmup_iterations": 0}
    cfg.credit = {"critic": critic | {"clip_grad_norm": own_limit}}
    cfg.optimizer = {"_component_": "torch.optim.SGD", "lr": 1.0}
    cfg.lr_scheduler = {"_component_": "loop_recipes.algorithm.lr_schedules.constant_with_warmup"}
    own = {"epochs": 1, "minibatch_rollouts": None, "clip_grad_norm": 0.001}
    cfg["update"] = OmegaConf.merge(cfg["update"], own)
    recipe = LoopAppWorldRecipe(cfg)
    with set_up(recipe):
        critic = {id(parameter) for parameter in recipe._method.credit["critic"].parameters()}
        before = {name: parameter.detach().clone() for name, parameter in recipe._learner.parameters.items()}
        recipe.train()
        moved = {True: 0.0, False: 0.0}
        for name, parameter in recipe._learner.parameters.items():
            moved[id(parameter) in critic] += (parameter - before[name]).double().square().sum().item()
    if own_limit is None:
        assert (moved[True] + moved[False]) ** 0.5 == pytest.approx(0.001, rel=1e-3)
        assert min(moved.values()) > 0
    else:
        assert moved[False] ** 0.5 == pytest.approx(0.001, rel=1e-3)
        assert moved[True] ** 0.5 == pytest.approx(0.01, rel=1e-3)


def test_the_policy_rests_while_the_critic_warms_up(tmp_path):
    critic = {"_component_": "loop_recipes.algorithm.critic.Critic", "warmup_iterations": 1}
    run(replay_config(tmp_path, iterations=2, credit={"critic": critic}))
    policies = [load_file(tmp_path / f"run/policies/policy-v000{n}/adapter_model.safetensors") for n in range(3)]
    moved = [any(not torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(policies)]
    assert moved == [False, True]


def test_the_value_loss_is_a_mean_whatever_the_losses_are_divided_by(tmp_path):
    config = replay_config(tmp_path, iterations=1)
    critic = [CRITIC, "update.minibatch_rollouts=null"]
    ways = [
        run(config, f"output_dir={tmp_path / each}", *critic, "update.epochs=1", f"update.loss_divisor={each}")[0]
        for each in ("mean", "100.0", "tokens")
    ]
    assert [way["value_loss"] for way in ways[1:]] == pytest.approx([ways[0]["value_loss"]] * 2)


def test_a_rollout_can_be_learned_from_up_to_a_length(tmp_path):
    """The metrics are those of the whole rollouts, but no more than the first 30 tokens go through the model."""
    config = replay_config(tmp_path, iterations=1)
    (line,) = run(config, "update.max_tokens_per_rollout=30", "update.token_statistics=True")
    assert line["tokens_max"] > 30
    rollouts = [json.loads(text) for text in (tmp_path / "logs/made-up-i0001.jsonl").read_text().splitlines()]
    sampled = {rollout["rollout_id"]: sum(rollout["mask"][:30]) for rollout in rollouts}
    trained = (tmp_path / "run/token_statistics/made-up-i0001.jsonl").read_text().splitlines()
    for record in map(json.loads, trained):
        assert len(record["ratios"]) == sampled[record["rollout_id"]]


def test_a_rollout_without_a_sampled_token_so_early_is_left_out_and_counted(tmp_path):
    config = replay_config(tmp_path, iterations=1)
    rollouts = [json.loads(text) for text in (tmp_path / "logs/made-up-i0001.jsonl").read_text().splitlines()]
    begins = sorted(rollout["mask"].index(1) for rollout in rollouts)
    length = begins[0] + 1
    left_out = sum(begin >= length for begin in begins)
    assert 0 < left_out < len(rollouts)
    (line,) = run(config, f"update.max_tokens_per_rollout={length}", "update.min_abs_advantage=0.0")
    assert (line["rollouts"], line["left_out_rollouts"]) == (len(rollouts), left_out)
    assert line["steps"] > 0


def test_reinforce_plus_plus_trains_on_returns_to_go_of_the_learners_own_log_probs(tmp_path, monkeypatch):
    """Against float64 log-probs of the exported policies and of the base model, in the second iteration."""
    seen = {}
    token_advantages = ReturnToGo.token_advantages

    def recording(self, samples):
        seen["penalties"] = [sample.old_logprobs - sample.ref_logprobs for sample in samples]
        seen["advantages"] = token_advantages(self, samples)
        return seen["advantages"]

    monkeypatch.setattr(ReturnToGo, "token_advantages", recording)
    config = replay_config(tmp_path, iterations=2)
    cfg = OmegaConf.load(config)
    cfg.advantage = {"_component_": "loop_recipes.algorithm.advantages.ReturnToGo", "kl_coefficient": 0.5}
    cfg.optimizer.lr = 0.02
    train(cfg)
    lines = [json.loads(text) for text in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["kept_fraction"] for line in lines] == [1.0, 1.0], "every token counts"
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    policy = PeftModel.from_pretrained(base, tmp_path / "run/policies/policy-v0001").double()
    log = (tmp_path / "logs/made-up-i0002.jsonl").read_text().splitlines()
    rollouts = sorted(map(json.loads, log), key=lambda rollout: rollout["rollout_id"])
    expected = []
    for rollout, penalty in zip(rollouts, seen["penalties"], strict=True):
        old = logprobs_by_hand(policy, rollout)
        with policy.disable_adapter():
            reference = logprobs_by_hand(policy, rollout)
        torch.testing.assert_close(penalty.double(), old - reference, rtol=0, atol=1e-4)
        expected.append(rollout["reward"] - 0.5 * (old - reference).flip(0).cumsum(0).flip(0))
    tokens = torch.cat(expected)
    for advantages, values in zip(seen["advantages"], expected, strict=True):
        torch.testing.assert_close(
            advantages.double(), (values - tokens.mean()) / tokens.std(correction=0), atol=1e-3, rtol=0
        )


def test_an_advantage_of_ones_own_that_knows_tokens_gives_each_token_its_own(tmp_path):
    config = replay_config(tmp_path, 1, advantage={"_component_": "support.small_runs.ByTokenPosition"})
    (line,) = run(config)
    sampled = [sum(rollout.mask) for rollout in read_rollouts(tmp_path / "logs/made-up-i0001.jsonl")]
    expected = torch.cat([torch.arange(count, dtype=torch.float64) for count in sampled])
    assert line["kept_fraction"] == 1.0
    assert line["advantage_std"] == pytest.approx(expected.std(correction=0).item())


def logprobs_by_hand(model, rollout):
    """[n], float64, of the sampled tokens."""
    token_ids = torch.tensor([rollout["token_ids"]])
    with torch.no_grad():
        logprobs = model(token_ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, token_ids[0, 1:, None]).squeeze(1)[torch.tensor(rollout["mask"][1:])]


@pytest.mark.parametrize("size", [0.01, 10.0])
@pytest.mark.parametrize("ranks", [1, 4, 8])
def test_the_authors_divisor_and_clip_are_ours_with_a_limit_larger_by_the_root_of_the_ranks(ranks, size):
    """They divide each rank's sum by 32, FSDP averages over the ranks, and the norm that they compare with 0.1 adds up
    the squares of the whole gradient's norm over the ranks. Ours is larger by the number of ranks: AdamW undoes it."""
    generator = torch.Generator().manual_seed(ranks)
    sums = [torch.randn(7, generator=generator, dtype=torch.float64) * size for _ in range(ranks)]
    theirs = sum(each / 32 for each in sums) / ranks
    compared = math.sqrt(ranks * theirs.square().sum().item())
    theirs = theirs * min(1.0, 0.1 / compared)

    parameter = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    parameter.grad = sum(sums) / 32
    clip_grad_norm([parameter], 0.1 * math.sqrt(ranks))
    torch.testing.assert_close(parameter.grad / ranks, theirs, rtol=1e-4, atol=1e-9)


@pytest.fixture
def passes(monkeypatch):
    """How many rollouts each pass over log-probs scored."""
    passes, recompute = [], Scorer.scored

    def counted(self, samples, version, reference):
        passes.append(len(samples))
        return recompute(self, samples, version, reference)

    monkeypatch.setattr(Scorer, "scored", counted)
    return passes


@pytest.mark.parametrize("minibatch", [None, 6])
@pytest.mark.parametrize("loss", ["Reinforce", "ClippedPolicyLoss"])
def test_the_first_step_of_the_policy_that_sampled_gives_the_log_probs_of_its_rollouts(
    tmp_path, monkeypatch, passes, loss, minibatch
):
    """The same steps, gap and token statistics as with a pass over all rollouts before the first."""
    update = {"minibatch_rollouts": minibatch, "epochs": 1, "micro_batch_tokens": 150, "token_statistics": True}
    component = {"_component_": f"loop_recipes.algorithm.losses.{loss}"}
    config = replay_config(tmp_path, iterations=1, loss=component, update=update)
    [once] = run(config, f"output_dir={tmp_path / 'once'}")
    monkeypatch.setattr(policy_update.PolicyUpdate, "_scored_by_their_step", lambda *_: set())
    [twice] = run(config, f"output_dir={tmp_path / 'twice'}")
    if minibatch is None:
        assert passes[0] == 0 < passes[1]
        assert (once["approx_kl"], once["ratio_max"]) == (0.0, 1.0)
    else:
        assert once["steps"] > 1
        assert 0 < passes[0] < passes[1]
        assert once["approx_kl"] == pytest.approx(twice["approx_kl"], rel=1e-2, abs=1e-7)
    for key in ("loss", "grad_norm", "kept_fraction", "advantage_std", "gap_mean", "gap_max", "steps", "policy_lag"):
        assert once[key] == pytest.approx(twice[key], rel=1e-5, abs=1e-7), key
    assert once["gap_mean"] > 0
    adapters = [
        load_file(tmp_path / name / "policies/policy-v0001/adapter_model.safetensors") for name in ("once", "twice")
    ]
    for name, tensor in adapters[0].items():
        torch.testing.assert_close(tensor, adapters[1][name], rtol=1e-4, atol=1e-7)
    lines = [
        [json.loads(line) for file in sorted((tmp_path / name / "token_statistics").iterdir()) for line in file.open()]
        for name in ("once", "twice")
    ]
    assert [line["rollout_id"] for line in lines[0]] == [line["rollout_id"] for line in lines[1]]
    for mine, theirs in zip(*lines, strict=True):
        assert mine["old_logprobs"] == pytest.approx(theirs["old_logprobs"], abs=2e-5)


@pytest.mark.parametrize(
    ("words", "rollouts"),
    [
        ("update.epochs=2", 10),
        ("update.exact_entropy=true", 10),
        ("loss.kl_coefficient=0.1", 10),
        (CRITIC, 12),
    ],
)
def test_more_than_that_step_needs_the_log_probs_before_it(tmp_path, passes, words, rollouts):
    plain = ["update.minibatch_rollouts=null", "update.epochs=1", "update.exact_entropy=false"]
    run(replay_config(tmp_path, iterations=1), *plain, words)
    assert passes == [rollouts], "all that have an advantage"
