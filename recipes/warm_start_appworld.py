"""The warm start: builds a tiny policy from nothing, by supervised training on an expert's play.

tune run warm_start_appworld --config warm_start_appworld/tiny_cpu
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from agent_environments.protocol import EnvironmentFault, create_pool
from loop_formats.folder_lock import lock_run
from loop_formats.places import METRICS_FILE
from loop_formats.run_files import to_json
from loop_formats.schema import ConfigError, made_folder, require
from loop_plumbing.separate_task import result_of
from loop_recipes.bar import Bar
from loop_recipes.config.command_line import parse
from loop_recipes.config.loop_config import read_config
from loop_recipes.config.preflight import check_can_write
from loop_recipes.engine.decoder import LogProbDecoder
from loop_recipes.engine.logprobs import FullLogProbs
from loop_recipes.exit_status import interrupted
from loop_recipes.warm_start import demonstration, demonstrator, tiny_model, tiny_tokenizer
from loop_recipes.warm_start.batches import Batch, copy_batches, demonstration_batches
from loop_recipes.warm_start.config import WarmStartConfig
from loop_recipes.warm_start.demonstration import Demonstration
from loop_recipes.warm_start.demonstrators import demonstrator_of
from loop_recipes.warm_start.held_out import HeldOut, measure
from model_families.chat import open_chat
from model_families.own_tokenizer import CODE


class WarmStartRecipe:
    """Supervised warm start of a tiny policy, on one process and a CPU.

    - Plays an expert's solutions of train tasks, some flawed on purpose, in the real environment: reference turns of a
      practice world that it generates (AppWorld), or the play of a world's own expert.
    - Trains a byte-level BPE on these conversations.
    - Starts a Qwen2 model with heads that look back, and teaches it to copy on random streams.
    - Trains on the agent's tokens only (Muon for hidden matrices, AdamW for the rest), with other names in each pass.
      The last passes teach a bad habit, which reinforcement learning can undo.
    - Refuses to write a policy whose loss on held-out clean demonstrations is above the gate: reinforcement learning
      would find nothing to reinforce.
    - Writes a folder that transformers, vLLM and torchtune load.

    Args:
        cfg (DictConfig): the recipe's YAML merged with the command line; the keys are those of
            :class:`~loop_recipes.warm_start.config.WarmStartConfig`.

    Raises:
        ConfigError: anything wrong with the config, before any work begins.
    """

    def __init__(self, cfg: DictConfig) -> None:
        self._config = read_config(cfg, WarmStartConfig)
        options = self._config.demonstrations
        self._demonstrator = demonstrator_of(self._config)
        for habit in options.habits:
            if habit not in self._demonstrator.flaws:
                known = ", ".join(self._demonstrator.flaws)
                raise ConfigError(f"demonstrations.habits has {habit!r}, not one of {known}")
        taught = any(cycle.habit_share for cycle in self._config.training.cycles)
        if taught and not (options.habit_count and options.habits):
            raise ConfigError("a cycle with a habit_share needs demonstrations.habits and a demonstrations.habit_count")
        size, fewest = self._config.tokenizer.vocab_size, tiny_tokenizer.FEWEST_PIECES
        require(size >= fewest, f"tokenizer.vocab_size must be at least {fewest}, not {size}")
        self._output_dir = Path(self._config.output_dir)
        self._cache = Path(options.cache)
        folders = {"output_dir": self._output_dir, "policy_dir": Path(self._config.policy_dir)}
        for key, folder in (folders | {"demonstrations.cache": self._cache}).items():
            check_can_write(folder, key)  # the policy's folder is written last, half an hour later

    def setup(self) -> None:
        """Make demonstrations, tokenizer, model and optimizers."""
        self._lock = lock_run(made_folder("output_dir", self._output_dir))
        self._demonstrator.prepare()
        self._setup_demonstrations()
        self._setup_model()
        self._setup_optimizers()

    def _fingerprint(self) -> str:
        """Return a digest of everything that the cached demonstrations depend on."""
        digest = hashlib.sha256()
        for section in (self._config.demonstrations, self._config.tokenizer):
            digest.update(json.dumps(asdict(section)).encode())
        digest.update(json.dumps([self._config.seed, self._config.model.max_seq_len]).encode())
        digest.update(json.dumps(asdict(self._demonstrator.environment), sort_keys=True).encode())
        shared = (demonstration.__file__, demonstrator.__file__, tiny_tokenizer.__file__)
        for source in (*self._demonstrator.sources(), *map(Path, shared)):
            digest.update(source.read_bytes())
        return digest.hexdigest()

    def _setup_demonstrations(self) -> None:
        """Play in two passes, because observations are cut by tokens and the tokenizer is trained on observations."""
        options, fingerprint = self._config.demonstrations, self._fingerprint()
        mark, file = self._cache / "fingerprint", self._cache / "demonstrations.jsonl"
        if not (mark.exists() and mark.read_text(encoding="utf-8") == fingerprint):
            self._cache.mkdir(parents=True, exist_ok=True)
            mark.unlink(missing_ok=True)
            first = self._play(options.split, self._config.tokenizer.demonstrations, tiny_tokenizer.piece_spans)
            rng = random.Random(self._config.seed)
            variants = (self._demonstrator.renamed(one, rng) for one in first for _ in range(4))
            texts = chain.from_iterable(map(self._demonstrator.texts, variants))
            sizes = self._config.tokenizer.vocab_size, self._config.tokenizer.min_frequency
            tiny_tokenizer.save(tiny_tokenizer.train(texts, *sizes), self._cache, self._config.model.max_seq_len)
            spans = open_chat(self._cache).spans
            clean = self._play(options.held_out_split, options.held_out, spans)
            usual = self._play(options.split, options.count, spans, seed=1, flawed_share=options.flawed_share)
            habitual = self._play(options.split, options.habit_count, spans, seed=2, habits=options.habits)
            demonstration.save([*clean, *usual, *habitual], file)
            mark.write_text(fingerprint, encoding="utf-8")
        self._tokens = open_chat(self._cache)
        played = demonstration.load(file)
        self._held_out = played[: options.held_out]
        self._usual = played[options.held_out :][: options.count]
        self._habitual = played[options.held_out + options.count :]
        self._log(
            demonstrations=len(self._usual),
            demonstration_reward=sum(one.reward for one in self._usual) / len(self._usual),
            demonstration_success=sum(one.success for one in self._usual) / len(self._usual),
            habitual_demonstrations=len(self._habitual),
            vocab_size=self._tokens.vocab_size,
        )

    def _play(self, split: str, count: int, spans: Any, seed: int = 0, **flaws: Any) -> list[Demonstration]:
        environment = self._demonstrator.environment
        pool = create_pool(environment.name, environment.options, spans)
        scripts = self._demonstrator.scripts(split, count, self._config.seed + seed, **flaws)
        return result_of(demonstration.collect(pool, scripts, self._config.demonstrations.at_once))

    def _setup_model(self) -> None:
        decoder = tiny_model.build(self._config.model, self._tokens.vocab_size)
        tiny_model.initialise(decoder, self._config.model, self._config.seed)
        self._model = LogProbDecoder(decoder, FullLogProbs())

    def _setup_optimizers(self) -> None:
        """Make Muon for hidden matrices, which it turns as a whole, and AdamW for embeddings, norms and biases."""
        options = self._config.training
        hidden: list[torch.nn.Parameter] = []
        others: list[torch.nn.Parameter] = []
        for name, parameter in self._model.named_parameters():
            is_matrix = parameter.ndim == 2 and name.startswith("layers.")
            (hidden if is_matrix else others).append(parameter)
        self._optimizers = [
            torch.optim.Muon(hidden, weight_decay=options.weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def train(self) -> None:
        """Train on copying first, then on demonstrations in cycles of the learning rate; then apply the gate.

        Each cycle's policy is written to ``output_dir/cycle-1``, ``cycle-2``, ...: the one before the cycle with the
        habits bounds the score that reinforcement learning can reach by undoing them.
        """
        cycles = self._config.training.cycles
        total = self._config.training.copy_steps + sum(cycle.steps for cycle in cycles)
        with Bar(total=total, doing="training") as self._bar:
            for number in range(len(cycles)):
                held_out = self.train_cycle(number)
                self._write_policy(self._output_dir / f"cycle-{number + 1}")
        highest = self._config.training.max_held_out_loss
        if held_out.loss > highest:
            raise ConfigError(
                f"the loss on held-out demonstrations is {held_out.loss:.3f}, above training.max_held_out_loss "
                f"{highest}: policy_dir was not written; train longer, or try another seed"
            )

    def train_cycle(self, number: int) -> HeldOut:
        """Train and measure one cycle, ``number`` from zero; the first begins with the streams to copy."""
        options = self._config.training
        lengths = [cycle.steps for cycle in options.cycles]
        lengths[0] += options.copy_steps
        before, last = sum(lengths[:number]), sum(lengths[: number + 1])
        rates = self._learning_rates(options.cycles[number].lr, lengths[number])
        losses: list[float] = []
        started = time.monotonic()
        for step, (batch, rate) in enumerate(zip(self._cycle_batches(number), rates, strict=True), start=before + 1):
            losses.append(self._step(batch, rate))
            phase = "copying" if step <= options.copy_steps else f"cycle {number + 1}"
            self._bar.set_description(f"{phase}, loss {losses[-1]:.3f}", refresh=False)
            self._bar.update()
            if step % options.log_every == 0 or step == last:
                recent = losses[-options.log_every :]
                seconds = round(time.monotonic() - started, 1)
                self._log(step=step, phase=phase, loss=sum(recent) / len(recent), seconds=seconds)
            if step % options.measure_every == 0 or step == last:
                held_out = self.measure()
                measured = {f"held_out_{name}": value for name, value in asdict(held_out).items()}
                self._log(step=step, **measured)
        return held_out

    def _cycle_batches(self, number: int) -> Iterator[Batch]:
        options, seed, pad_id = self._config.training, self._config.seed, self._tokens.pad_id
        cycle = options.cycles[number]
        copying = copy_batches(options.copy_steps, options.tokens_per_step, self._tokens.vocab_size, pad_id, seed)
        demonstrations = demonstration_batches(
            self._usual,
            self._habitual,
            cycle.habit_share,
            cycle.steps,
            options.tokens_per_step,
            self._tokens,
            self._demonstrator.renamed,
            f"{seed}.{number}",
        )
        return chain(copying, demonstrations) if number == 0 else demonstrations

    def _learning_rates(self, peak: float, steps: int) -> list[float]:
        rising = ((step + 1) / self._config.training.lr_warmup_steps for step in range(steps))
        falling = (0.5 + 0.5 * math.cos(math.pi * step / steps) for step in range(steps))
        return [peak * min(pair) for pair in zip(rising, falling, strict=True)]

    def _step(self, batch: Batch, rate: float) -> float:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad(set_to_none=True)
        loss = -self._model(batch.tokens, rows=batch.rows, targets=batch.targets).logprobs.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.training.clip_grad_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        return loss.item()

    def measure(self) -> HeldOut:
        """Measure the policy on the held-out, clean demonstrations, by group of tasks."""
        groups = {one.task_id: self._demonstrator.group(one.task_id) for one in self._held_out}
        return measure(self._model, self._held_out, self._tokens, groups)

    def save_checkpoint(self) -> None:
        folder = Path(self._config.policy_dir)
        self._write_policy(folder)
        print(f"tiny policy: {folder}")

    def _write_policy(self, folder: Path) -> None:
        marks = {"pad_id": self._tokens.pad_id, "stop_id": self._tokens.turn_end}
        tiny_model.save(self._model, self._config.model, folder, **marks)
        for name in ("tokenizer.json", "tokenizer_config.json", CODE):
            (folder / name).write_bytes((self._cache / name).read_bytes())

    def _log(self, **values: Any) -> None:
        """Write one line of metrics.jsonl, and the same to the terminal."""
        line = to_json(values)
        with (self._output_dir / METRICS_FILE).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
        print(line)


@parse(WarmStartConfig)
def recipe_main(cfg: DictConfig) -> int | str:
    """Entry point of `tune run warm_start_appworld`: ``cfg`` is composed from --config and the words after it."""
    try:
        recipe = WarmStartRecipe(cfg)
        recipe.setup()
        recipe.train()
        recipe.save_checkpoint()
    except (ConfigError, EnvironmentFault, OSError) as error:
        return f"warm_start_appworld: {error}"
    except KeyboardInterrupt:
        return interrupted("warm_start_appworld", "the same command reuses finished demonstrations and trains anew")
    return 0


if __name__ == "__main__":
    sys.exit(recipe_main())
