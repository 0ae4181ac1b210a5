"""A critic of turns with a value head: SWEET-RL's ablation "with regression head" (arXiv 2503.15478, section 5.4).

The advantage of a turn is a linear function of its tokens' mean last hidden state, in place of their mean log-ratio.
The loss is the same, Bradley and Terry over the sums of a pair's turns (eq. 2). Here the model below the head stays as
it is, so its hidden states are computed once; the authors train it too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from loop_contrib.sweet_rl.turn_critic import HiddenPrefix, by_turn
from loop_recipes.algorithm.preferences import ReturnPairs
from loop_recipes.algorithm.scoring import Scorer
from loop_recipes.engine.samples import Sample


class TurnValueHead:
    """Learns from rollouts of some tasks and gives the turns of others their advantages.

    Every rank calls every method with the same samples, those that the actor sees.

    Args:
        scorer: of the learner whose model gives the hidden states, with the adapter that is in it.
        prefix: the critic's text before the prompt; None for the actor's view.
        beta: as in :class:`~loop_contrib.sweet_rl.turn_critic.TurnAdvantage`.
        weight_decay: of AdamW.
    """

    def __init__(
        self, scorer: Scorer, prefix: HiddenPrefix | None = None, beta: float = 0.1, weight_decay: float = 0.01
    ) -> None:
        self._scorer, self._prefix, self._beta, self._weight_decay = scorer, prefix, beta, weight_decay
        self._head: nn.Linear | None = None
        self._centre: Tensor | None = None

    def fit(self, samples: Sequence[Sample], pairs: ReturnPairs, steps: int = 300, lr: float = 0.01) -> list[float]:
        """Train the head from zero on all pairs at once; returns the loss of every step.

        Raises:
            ValueError: the returns make no pair.
        """
        states = self._turn_states(samples)
        tasks = {task: number for number, task in enumerate(sorted({sample.task_id for sample in samples}))}
        groups = torch.tensor([tasks[sample.task_id] for sample in samples])
        chosen_rejected = pairs.pairs(torch.tensor([sample.reward for sample in samples]), groups)
        if not chosen_rejected:
            raise ValueError(f"the returns of {len(samples)} rollouts make no pair to learn from")
        every = torch.cat([states[sample.rollout_id] for sample in samples])
        # A constant part of all states would count turns, and no scale of a layer should set the rate of learning.
        self._centre, scale = every.mean(0), every.std(0).clamp(min=1e-6)
        sums = [((states[sample.rollout_id] - self._centre) / scale).sum(0) for sample in samples]
        differences = torch.stack([sums[chosen] - sums[rejected] for chosen, rejected in chosen_rejected])
        head = nn.Linear(every.shape[1], 1, bias=False)
        nn.init.zeros_(head.weight)
        optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=self._weight_decay)
        losses = []
        for _ in range(steps):
            loss = -logsigmoid(self._beta * head(differences)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        head.weight.data /= scale
        self._head = head
        return losses

    @torch.no_grad()
    def advantages(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Return A of each turn with a sampled token, [t] float64, by rollout id.

        Raises:
            RuntimeError: it has learned nothing yet.
        """
        if self._head is None or self._centre is None:
            raise RuntimeError("a value head must be fitted before it judges")
        head, centre = self._head, self._centre
        return {name: head(states - centre).squeeze(1).double() for name, states in self._turn_states(samples).items()}

    def _turn_states(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Mean last hidden state over each turn's tokens, [t, d], by rollout id."""
        with_hidden = samples if self._prefix is None else self._prefix.before(samples)
        model = self._scorer.model
        hidden = self._scorer.per_token(with_hidden, lambda batch: model(**batch.inputs(), with_hidden=True).hidden)
        return {
            sample.rollout_id: by_turn(hidden[sample.rollout_id].float(), sample.turn_ids[sample.mask])
            for sample in samples
        }
