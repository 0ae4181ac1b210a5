"""The keys of ``warm_start_appworld``'s YAML, each with its sentence."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from pydantic.dataclasses import dataclass

from loop_formats.schema import STRICT, Some, require
from rollout_server.config import EnvironmentConfig

Share = Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True, config=STRICT)
class PracticeWorld:
    """A synthetic world to practise in, with other people and tasks than the world to train and test on."""

    root: str
    """Folder the world is generated in."""
    seed: int
    """Seed of the generator."""
    scenarios_per_template: PositiveInt
    """Scenarios made of each template of tasks; each has three tasks."""
    people: PositiveInt
    """People of the world."""


@dataclass(frozen=True, config=STRICT)
class DemonstrationConfig:
    """An expert's play of tasks, some of it flawed on purpose."""

    split: str
    """The tasks to demonstrate (AppWorld: the practice world's)."""
    held_out_split: str
    """The tasks whose clean demonstrations are measured instead of trained on."""
    count: PositiveInt
    """Episodes trained on."""
    flawed_share: Share
    """Share of the training episodes with a flaw."""
    habits: list[str]
    """The flaws that the last cycles teach. AppWorld: those of docs/results/demo.md; ColBench: ``answered_at_once``,
    ``stopped_asking``; the worlds: ``gave_up``, ``stopped_short``, ``skipped_step``. A flaw that is listed twice is
    drawn twice as often. ``training.cycles`` explains their use."""
    habit_count: NonNegativeInt
    """Further episodes, each with one of the flaws ``habits``."""
    held_out: PositiveInt
    """Episodes measured."""
    at_once: PositiveInt
    """Episodes that run at the same time."""
    cache: str
    """Folder that keeps the episodes for the next time."""


@dataclass(frozen=True, config=STRICT)
class TokenizerConfig:
    """The byte-level BPE."""

    vocab_size: int
    """The most entries it may have, special tokens included."""
    min_frequency: PositiveInt
    """Occurrences below which a pair is not merged."""
    demonstrations: PositiveInt
    """Number of clean episodes, cut by pre-tokens, to train it on."""


@dataclass(frozen=True, config=STRICT)
class TinyModelConfig:
    """A Qwen2 model."""

    num_layers: PositiveInt
    """Transformer layers."""
    num_heads: PositiveInt
    """Attention heads."""
    num_kv_heads: PositiveInt
    """Heads of keys and values."""
    embed_dim: PositiveInt
    """Width."""
    intermediate_dim: PositiveInt
    """Width inside the MLP."""
    max_seq_len: PositiveInt
    """Longest sequence, in tokens."""
    norm_eps: PositiveFloat
    """Epsilon of the RMS norms."""
    rope_base: PositiveFloat
    """Base of the rotary embedding."""
    sharpness: float
    """Sharpness of the first layer's look-back heads before training: ``tiny_model.look_back``."""

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.num_heads

    def __post_init__(self) -> None:
        fits = self.embed_dim % (2 * self.num_heads) == 0
        require(fits, f"embed_dim is {self.embed_dim}; it must be a multiple of 2 num_heads = {2 * self.num_heads}")
        shares = self.num_heads % self.num_kv_heads == 0
        require(shares, f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads = {self.num_kv_heads}")


@dataclass(frozen=True, config=STRICT)
class Cycle:
    """A cosine from ``lr`` to zero over ``steps`` batches of demonstrations.

    A small model learns the source of each kind of value in sudden steps, one kind after the other. It learns the rest
    after a restart, when the rate is up again. A last, gentle cycle may teach it a bad habit: reinforcement learning
    can undo a wrong way that the model prefers though it knows better.
    """

    steps: PositiveInt
    """Batches."""
    lr: PositiveFloat
    """Learning rate at the start."""
    habit_share: Share = 0.0
    """Share of demonstrations that show a habit."""


@dataclass(frozen=True, config=STRICT)
class TrainingConfig:
    """Muon for hidden matrices, AdamW for the rest."""

    copy_steps: NonNegativeInt
    """Batches of random streams to copy, before the demonstrations; the first cycle spans them too."""
    cycles: Some[Cycle]
    tokens_per_step: PositiveInt
    """Tokens of one batch."""
    lr_warmup_steps: PositiveInt
    """Batches of each cycle over which the rate rises."""
    weight_decay: NonNegativeFloat
    """Weight decay of the hidden matrices."""
    clip_grad_norm: PositiveFloat
    """The largest norm of the gradient."""
    log_every: PositiveInt
    """Batches between two lines of the log."""
    measure_every: PositiveInt
    """Batches between two measurements on the held-out demonstrations."""
    max_held_out_loss: PositiveFloat
    """The recipe fails if the held-out loss ends above this."""


@dataclass(frozen=True, config=STRICT)
class WarmStartConfig:
    """All keys of the recipe `warm_start_appworld`."""

    output_dir: str
    """Folder of logs, and of the policy after each cycle: ``cycle-1``, ``cycle-2``, ..."""
    policy_dir: str
    """Folder the policy is written to."""
    seed: int
    """Seed of everything that is drawn."""
    demonstrations: DemonstrationConfig
    environment: EnvironmentConfig
    tokenizer: TokenizerConfig
    model: TinyModelConfig
    training: TrainingConfig
    practice_world: PracticeWorld | None = None
    """AppWorld only, whose one expert is the reference solutions of its tasks."""
