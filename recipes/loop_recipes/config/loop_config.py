"""The keys of ``loop_appworld``'s YAML and those that other recipes share, each with its sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BeforeValidator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from loop_formats.collection_request import Limits, check_temperature
from loop_formats.rollout import Rollout
from loop_formats.schema import STRICT, ConfigError, Seed, Some, fields_of, from_mapping, require
from loop_plumbing.urls import url_problem
from loop_recipes.config.rollout_node import RolloutNodeConfig, WithNode, read_token
from loop_recipes.paths import KINDS
from model_families.weights.hub import kept_name, local_path
from rollout_server.config import as_keys, resolved

Section = TypeVar("Section")
COMPONENT = "component"
Component = Annotated[dict[str, Any], COMPONENT]
"""A class or function to build, by ``_component_``, and its arguments."""
TrackerNames = Annotated[
    list[Literal["tensorboard", "wandb", "mlflow", "trackio"]],
    BeforeValidator(lambda names: [names] if isinstance(names, str) else names),
]


def _from_its_folder(model: Any) -> Any:
    if not isinstance(model, dict) or "path" not in model:
        return model
    path = local_path(model["path"]) if isinstance(model["path"], str) else model["path"]
    return {"_component_": FROM_ITS_FOLDER, **model, "path": path}


FROM_ITS_FOLDER = "loop_recipes.engine.model_builders.lora_model"
Model = Annotated[Component, BeforeValidator(_from_its_folder)]
"""The base model's folder or its name on the hub, by ``path``, and its LoRA; or a builder."""
Dtype = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True, config=STRICT)
class RolloutSourceConfig(RolloutNodeConfig):
    """The source of rollouts: exactly one of ``launch``, ``url`` and ``replay``."""

    replay: str | None = None
    """Trains on stored rollouts: a folder with one ``*.jsonl`` log per iteration, taken in the order of their names."""

    def _ways(self) -> dict[str, bool]:
        return {**super()._ways(), "replay": self.replay is not None}


@dataclass(frozen=True, config=STRICT)
class HorizonStage:
    """A stage of the interaction horizon."""

    from_iteration: NonNegativeInt
    """The first iteration of the stage."""
    max_turns: PositiveInt
    """Turns that its episodes may take."""


@dataclass(frozen=True, config=STRICT)
class EnvironmentPartConfig:
    """The part of one environment of a mixture (``node.environment.name: mixed``)."""

    share: PositiveFloat = 1.0
    """Its share of ``tasks_per_iteration``, relative to the shares of the others."""
    max_turns: PositiveInt | None = None
    """Turns of its episodes, in place of ``limits.max_turns``."""
    horizons: list[HorizonStage] = field(default_factory=list)
    """Stages of its own, in place of ``collection.horizons``."""


@dataclass(frozen=True, config=STRICT)
class CollectionConfig:
    """The rollouts that an iteration requests from the rollout node."""

    tasks_per_iteration: PositiveInt
    """Tasks drawn for one iteration, all of them different."""
    rollouts_per_task: int
    """Rollouts of each task, at least 2: the group of the leave-one-out baseline."""
    min_rollouts_per_task: int
    """The collection may end once every task has this many rollouts."""
    limits: Limits
    min_rollouts_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The collection may end once this share of all rollouts is finished."""
    split: str = "train"
    """Tasks to train on: a split of the dataset, with difficulties as in ``train:1,2``."""
    task_order: Literal["passes", "uniform"] = "passes"
    """``passes`` visits every task once before any a second time, all groups in turn; ``uniform`` draws each
    iteration's tasks from all of them, independent of earlier draws (the paper)."""
    tasks: Some[str] | None = None
    """Task ids to train on instead of a split."""
    horizons: list[HorizonStage] = field(default_factory=list)
    """Stages that replace ``limits.max_turns`` from the first stage's iteration on."""
    environments: dict[str, EnvironmentPartConfig] = field(default_factory=dict)
    """Shares and horizons of a mixture's environments, by name. An environment without an entry has a share of 1. Empty
    draws from the tasks of all environments alike."""
    stream: bool = False
    """Keeps the node at work on groups (a task's rollouts) without an end; an iteration takes the first
    ``tasks_per_iteration`` whole groups, and the others go on (docs/training.md)."""
    max_policy_lag: NonNegativeInt = 0
    """1 collects the next iteration while this one is trained on. In a stream, the most versions that a rollout's turn
    may be behind the newest; no group starts that would be older."""
    publish_every: PositiveInt = 1
    """Updates from one version that the node serves to the next, in a stream: each version empties the prefix cache of
    running episodes."""
    policy_mode: Literal["pinned", "latest"] | None = None
    """``pinned`` samples a whole episode from one policy version, ``latest`` takes the newest one at every turn; null
    is ``latest`` in a stream, else ``pinned``."""
    deadline_s: PositiveFloat = 7200.0
    """Seconds until a collection must have ended."""
    max_lost_share: Annotated[float, Field(ge=0, lt=0.5)] = 0.25
    """The run ends when a larger share of an iteration's rollouts is lost: all attempts at them failed through no fault
    of the agent. It is below half, so that there is always something to learn from."""
    refill_budget: Annotated[float, Field(ge=1)] = 1.0
    """Tasks that an iteration may sample in all, in units of ``tasks_per_iteration``: others of the split replace tasks
    whose rollouts carry no signal until the budget is used up. 1 replaces none."""
    rest_iterations: NonNegativeInt = 0
    """Iterations that a task rests after an iteration in which its rollouts carried no signal."""
    max_broken_share: Annotated[float, Field(ge=0, le=1)] = 0.25
    """An iteration ends the run if the environment itself broke in a larger share of its episodes. 1 never ends it."""

    def __post_init__(self) -> None:
        most, least = self.rollouts_per_task, self.min_rollouts_per_task
        require(most >= 2, f"rollouts_per_task is {most}; leave-one-out needs at least 2")
        allowed = "2" if most == 2 else f"2 to {most}"
        require(2 <= least <= most, f"min_rollouts_per_task is {least}; it must be {allowed}, by rollouts_per_task")
        distinct = self.tasks is None or len(set(self.tasks)) == len(self.tasks)
        require(distinct, "tasks must be distinct")
        if not self.stream:
            require(self.max_policy_lag <= 1, f"max_policy_lag is {self.max_policy_lag}; above 1 it needs stream: true")
            require(self.publish_every == 1, "publish_every must be 1 without stream: true")
            return
        for key, value in (("refill_budget", 1), ("rest_iterations", 0)):
            require(
                getattr(self, key) == value, f"{key} must be {value} with stream: true, whose groups are not rounds"
            )
        least = self.publish_every - 1
        require(
            self.max_policy_lag >= least, f"max_policy_lag must be at least {least} with publish_every: {least + 1}"
        )

    @property
    def mode(self) -> Literal["pinned", "latest"]:
        """``policy_mode``, or its default."""
        return self.policy_mode or ("latest" if self.stream else "pinned")

    @property
    def depends_on_signal(self) -> bool:
        """True if the signal of earlier rollouts decides which tasks are collected."""
        return self.refill_budget > 1 or self.rest_iterations > 0


@dataclass(frozen=True, config=STRICT)
class UpdateConfig:
    """The update of an iteration."""

    epochs: PositiveInt = 1
    """Passes over the rollouts of the iteration."""
    minibatch_rollouts: PositiveInt | None = 32
    """Rollouts of one optimizer step; null takes one step per epoch on all rollouts with signal."""
    minibatch_sizes: Literal["even", "full"] = "even"
    """``even`` divides the rollouts into minibatches of nearly one size, about ``minibatch_rollouts``; ``full`` makes
    them exactly that large, the last one smaller (the authors' code)."""
    micro_batch_tokens: PositiveInt = 32768
    """Tokens of one forward pass, padding included; a longer rollout is a batch of its own."""
    packed: bool = False
    """Packs several rollouts into one row in place of padding them."""
    min_abs_advantage: NonNegativeFloat = 0.01
    """Rollouts with a smaller advantage carry no signal and are left out. A loss on pairs leaves out those without a
    partner instead."""
    loss_divisor: Literal["mean", "tokens"] | PositiveFloat = "mean"
    """``mean`` over the rollouts of the minibatch, each a mean over its tokens, as in the paper (for a loss on pairs:
    over the pairs); ``tokens``: over all their sampled tokens alike (DAPO); or a constant in place of the number of
    rollouts (the authors' code: 32, whatever the filter leaves)."""
    clip_grad_norm: PositiveFloat | None = 1.0
    """The largest norm of the gradient; null does not clip."""
    episode_return: Literal["reward", "success"] = "reward"
    """The return to learn from: the reward, or 1 where the grader says that the task is solved and 0 elsewhere, without
    rewards of turns. Metrics and filters of tasks use both unchanged."""
    unfinished_return: Literal["graded", "zero"] = "graded"
    """Return of a rollout that ran into its turns, context or deadline: ``episode_return`` as graded (the authors'
    code), or 0."""
    max_tokens_per_rollout: PositiveInt | None = None
    """Number of first tokens of a rollout to learn from (the authors' code: 32000 of up to 32768); a rollout with no
    sampled token among them is left out; null learns from all."""
    max_trajectory_log_ratio: PositiveFloat | None = None
    """Leaves out a step, and the iteration's later ones, where the log-ratio to the sampling policy, summed over each
    rollout's tokens, is further than this from 0 in the minibatch's mean (the authors' code: 20); null never."""
    exact_entropy: bool = False
    """Writes the metric ``entropy``, at the cost of one more pass of the head where old log-probs are recomputed."""
    token_statistics: bool = False
    """Keeps each token's log-prob, ratio and clip of every update for `loop view`, about 25 bytes each; 8 more hold its
    entropy with ``exact_entropy``, and 6 its advantage where it has one of its own, as with a critic."""

    def return_of(self, rollout: Rollout) -> float:
        """Return the value in [0, 1] to learn from, the part of the grade that these keys choose."""
        if self.unfinished_return == "zero" and rollout.end_reason != "completed":
            return 0.0
        return rollout.reward if self.episode_return == "reward" else float(rollout.success)


AS_GRADED = UpdateConfig()


@dataclass(frozen=True, config=STRICT)
class DevEvaluationConfig:
    """Scores during training, for choosing a checkpoint: ``runs`` rollouts of every task, made during the update of the
    next iteration, or after it if GPUs are shared. The checkpoint with the best success is kept. The scores to
    report are those of `eval_appworld`."""

    every: NonNegativeInt = 0
    """Scores the policy before the first iteration and after each ``every``; 0 never."""
    split: str = "dev"
    """The tasks to score."""
    temperature: float = 0.0
    """0 is greedy; at most 2."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the probability to sample from (nucleus sampling)."""
    runs: PositiveInt = 1
    """Rollouts of a task; with several, pass@k and pass^k are logged too, where k is their number."""
    max_turns: PositiveInt = 50
    """Turns of an episode."""
    environment_turns: dict[str, PositiveInt] = field(default_factory=dict)
    """Turns that the episodes of a mixture's environments may take, by name, in place of ``max_turns``."""

    def __post_init__(self) -> None:
        check_temperature(self.temperature)


@dataclass(frozen=True, config=STRICT)
class StopConfig:
    """Conditions under which a run stops by itself and says why."""

    iterations_without_signal: int | None = 10
    """Iterations in a row without a rollout with an advantage after which the run stops; null never."""
    max_approx_kl: float | None = None
    """Value of the metric ``approx_kl`` above which the run stops; null never."""

    def reason(self, idle_iterations: int, approx_kl: float) -> str | None:
        """Return the reason to stop now, or None."""
        if self.iterations_without_signal is not None and idle_iterations >= self.iterations_without_signal:
            return f"{idle_iterations} iterations without signal (stop.iterations_without_signal)"
        if self.max_approx_kl is not None and approx_kl > self.max_approx_kl:
            return f"approximate KL {approx_kl:.3g} is over stop.max_approx_kl {self.max_approx_kl}"
        return None


@dataclass(frozen=True, config=STRICT)
class GapConfig:
    """Thresholds for the gap abs(sampler log-prob - learner log-prob). An iteration is judged by the 99th percentile, a
    mixture of experts in half precision by the mean. A published version is refused by the mean and the 90th
    percentile over its canary. In half precision the gap before the first step counts, too: between these thresholds,
    a gap up to twice that first gap is ok, and a gap above eight times the first is broken."""

    ok: float = 1e-3
    """Largest gap with the verdict "ok", above it perhaps "drift"; a canary's mean may be this large."""
    broken: float = 0.1
    """Gap above which the verdict is "broken", which ends a run; a canary's 90th percentile may be this large."""


@dataclass(frozen=True, config=STRICT)
class EndpointConfig:
    """An endpoint in OpenAI's protocol: ``POST <url>/chat/completions``, for a teacher ``POST <url>/completions``."""

    url: str
    """The address without ``/chat/completions`` or ``/completions``."""
    model: str
    """The name of the model there."""
    api_key_env: str | None = "OPENAI_API_KEY"
    """The environment variable that holds the key; null sends none."""
    max_concurrent: PositiveInt = 8
    """Episodes, or a teacher's requests, at the same time."""
    request_timeout_s: PositiveFloat = 600.0
    """Seconds until one answer must have come."""
    request: dict[str, Any] = field(default_factory=dict)
    """Keys merged into the body of every request, for options that only some services take; null leaves a key out."""

    def __post_init__(self) -> None:
        if (problem := url_problem(self.url)) is not None:
            raise ConfigError(f"url {problem}")

    @property
    def digest(self) -> str:
        """A text that identifies everything known here on which a result depends."""
        return f"endpoint {self.url} {self.model} {json.dumps(self.request, sort_keys=True)}"

    def headers(self) -> dict[str, str]:
        """Return the headers that authorize a request.

        Raises:
            ConfigError: the environment variable is not set, or no header can carry its value.
        """
        if self.api_key_env is None:
            return {}
        key = read_token(self.api_key_env)
        if not key:
            raise ConfigError(
                f"the environment variable {self.api_key_env} must hold the endpoint's key (api_key_env: null for none)"
            )
        return {"Authorization": f"Bearer {key}"}


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LearnerConfig:
    """The keys that all recipes with a learner share."""

    output_dir: str
    """Folder of the run: metrics, policies, checkpoints and the launched node's files."""
    model: Model
    """The base model's folder, by ``path``, with ``lora_rank``, ``lora_alpha`` and perhaps ``lora_attn_modules``,
    ``apply_lora_to_mlp``, ``lora_dropout``, ``max_context`` where it is served with another than this config's; or one
    of torchtune's builders of LoRA models with all its arguments."""
    advantage: Component
    """From ``loop_recipes.algorithm.advantages``: compares a rollout's return with others; ``ReturnPairs`` from
    ``loop_recipes.algorithm.preferences`` for a loss on pairs."""
    loss: Component
    """From ``loop_recipes.algorithm.losses``, or one on pairs from ``loop_recipes.algorithm.preferences``."""
    log_probs: Component
    """From ``loop_recipes.engine.logprobs``: the head that gives the sampled tokens' log-probs."""
    optimizer: Component
    """A ``torch.optim`` optimizer that keeps numbers and tensors of its parameters' shapes; Adafactor does not."""
    lr_scheduler: Component
    """From ``loop_recipes.algorithm.lr_schedules``, or one of torchtune's; a step is an iteration."""
    max_iterations: PositiveInt
    """Iterations of the whole run, those before a resume included."""
    checkpointer: Component | None = None
    """torchtune's checkpointer, which reads the base model of one of its builders; null with ``model.path``."""
    update: UpdateConfig = field(default_factory=UpdateConfig)
    seed: Seed = 0
    """Seed of tasks, episodes, the new adapter and minibatches."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda|cuda:\d+)$")] = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: Dtype = "fp32"
    """Precision of base weights and computation; LoRA masters and gradients are always fp32."""
    adapter_dtype: Dtype = "fp32"
    """Precision of the adapters that are exported and served."""
    enable_activation_checkpointing: bool = False
    """Recomputes each layer's activations in the backward pass."""
    enable_activation_offloading: bool = False
    """Keeps the inputs for that in the host's memory."""
    keep_attention: bool = False
    """Recomputes all but attention, for one more tensor of the queries' width in each layer; not with ``compile``."""
    attention: Literal["auto", "fa2", "fa4"] = "auto"
    """For packed rows in half precision on CUDA: FlashAttention-2; or 4 with the kernels of vLLM's wheel for capability
    9.x and 10.x, compared with fp32 at start; ``auto`` is 4 on Hopper for heads of 128, where that works, else 2."""
    sequence_parallel: PositiveInt = 1
    """Ranks that share each packed row: a part of its tokens each, and in attention of its heads. A rank still takes
    ``update.micro_batch_tokens``."""
    compile: bool = False
    """Compiles each layer with ``torch.compile``; needs a C++ compiler, on a GPU triton."""
    initial_adapter: str | None = None
    """A PEFT adapter to begin with; null begins with a new one, which changes nothing at first."""
    resume_from_checkpoint: bool = False
    """Goes on with the newest checkpoint in ``output_dir``, if there is one."""
    accept_changes: bool = False
    """A resumed run goes on though its base model, initial adapter, tasks or their grader differ from those of its
    checkpoint, and a run begins with an adapter that was trained on other base weights; the log says which."""
    keep_last_checkpoints: PositiveInt = 2
    """Number of checkpoints to keep, beside the best of ``dev_evaluation`` and the one it is scoring."""
    tracker: TrackerNames = field(default_factory=list)
    """Shows the figures of ``metrics.jsonl`` elsewhere: ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``, or a list
    of them (docs/training.md)."""
    metric_logger: list[Component] = field(default_factory=list)
    """torchtune's metric loggers, as further trackers."""

    @property
    def base_model(self) -> str:
        """The folder of the base model."""
        return self.model["path"] if self.checkpointer is None else self.checkpointer["checkpoint_dir"]


@dataclass(frozen=True, config=STRICT, kw_only=True)
class LoopConfig(LearnerConfig, WithNode):
    """All keys of the recipe `loop_appworld`."""

    rollout_node: RolloutSourceConfig
    collection: CollectionConfig
    credit: dict[str, Component] = field(default_factory=dict)
    """Methods that give tokens advantages of their own, one after the other, by names of your choice: subclasses of
    ``loop_recipes.algorithm.credit.Credit``. Empty gives all tokens of a rollout its advantage."""
    stop: StopConfig = field(default_factory=StopConfig)
    dev_evaluation: DevEvaluationConfig = field(default_factory=DevEvaluationConfig)
    sampler_gap: GapConfig = field(default_factory=GapConfig)
    run_name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")] | None = None
    """Begins the ids of this run's collections; null joins the output folder's name and a random part."""
    stress_test: bool = False
    """Runs one forward and backward pass of ``collection.limits.max_context`` tokens before the first iteration."""
    device_peak_tflops: PositiveFloat | None = None
    """Peak of one device, for the metric ``model_flops_utilization``; null leaves it out."""

    @property
    def longest_rollout(self) -> int:
        """Tokens of the longest rollout to train on."""
        context = self.collection.limits.max_context
        return min(context, self.update.max_tokens_per_rollout or context)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_compaction("collection.limits", self.collection.limits)
        require(
            not (self.takes_turns and self.collection.max_policy_lag),
            "collection.max_policy_lag must be 0 with node.servers.share: trainer: nothing is sampled during an update",
        )
        if self.collection.stream:
            self._check_stream()
        for name in self.credit:  # the name also names a file of checkpoints
            fit = re.fullmatch("[a-z_]+", name) and name not in ("optimizer", "rng")
            require(fit, f"credit: {name} is not a name; take small letters and _, but not optimizer or rng")
        if self.rollout_node.replay is not None:
            require(self.dev_evaluation.every == 0, "dev_evaluation.every must be 0 with rollout_node.replay")
            require(self.collection.refill_budget == 1, "collection.refill_budget must be 1 with rollout_node.replay")
        if self.rollout_node.launch:
            self._check_child()

    def _check_stream(self) -> None:
        conf = self.collection
        require(not self.takes_turns, "collection.stream must be false with node.servers.share: trainer: servers sleep")
        url = self.rollout_node.url
        require(url is None or "," not in url, "collection.stream takes one node: give rollout_node.url one address")
        least = conf.max_policy_lag + 2
        if conf.mode == "pinned" and self.rollout_node.launch:
            slots = self.child.servers.max_loras
            why = f"for policy_mode: pinned in a stream of max_policy_lag {conf.max_policy_lag}"
            require(slots >= least, f"node.servers.max_loras is {slots}; {why} it must be at least {least}")

    def _check_child(self) -> None:
        served, limits = self.child.model, self.collection.limits
        require(
            not self.takes_turns or self.device != "cpu",
            "node.servers.share must be null with device: cpu: vLLM's build for CPUs cannot sleep",
        )
        require(
            limits.max_context <= served.max_context,
            f"collection.limits.max_context is {limits.max_context}, more than the node's "
            f"node.model.max_context, {served.max_context}",
        )
        rank = self.model.get("lora_rank")
        require(
            not isinstance(rank, int) or rank <= served.lora_rank,
            f"model.lora_rank is {rank}, but node.model.lora_rank {served.lora_rank}",
        )


def keys_to_keep(config: Any) -> dict[str, Any]:
    """Return the keys of a config as a run's files store them. A hub model is stored by name and commit, which mean the
    same on every machine."""
    keys = as_keys(config)
    for section in (keys.get("model"), (keys.get("node") or {}).get("model")):
        if isinstance(section, dict) and isinstance(section.get("path"), str):
            section["path"] = kept_name(section["path"])
    return keys


_LIMIT = "collection.limits.max_context"


def read_config(cfg: DictConfig | Mapping[str, Any], section: type[Section]) -> Section:
    """Resolve ``cfg`` and turn it into ``section``, without the keys of other recipes. Only the config itself is
    checked; preflight.py checks the files that it names.

    Raises:
        ConfigError: an interpolation that does not resolve, an unknown, missing or ill-typed key.
    """
    others = {*KINDS, *fields_of(LoopConfig)} - fields_of(section).keys()
    try:
        config = cfg if isinstance(cfg, DictConfig) else OmegaConf.create(dict(cfg))
        plain = resolved(config, [str(key) for key in config if key not in others])
        context = OmegaConf.select(config, "node.model.max_context") or OmegaConf.select(config, _LIMIT)
        model = plain.get("model")
        if context is not None and isinstance(model, dict) and "path" in model and "_component_" not in model:
            model.setdefault("max_context", context)
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {str(error).splitlines()[0]}") from error
    return from_mapping(section, plain)
