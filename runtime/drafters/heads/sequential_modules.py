"""The modules of heads that draft token by token: Hydra, Hydra++ (Ankner et al., 2024), and a layer for multi-token
prediction as in DeepSeek-V3 (2024)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hdtool.runtime.config import HeadsConfig
from hdtool.runtime.drafters.heads.kv_cache import Attended
from hdtool.runtime.drafters.heads.modules import (
    EPSILON,
    AdaptationLayer,
    Heads,
    HeadsShape,
    Norm,
    OutputLayer,
    zero_linear,
)
from hdtool.runtime.model.cache.kv_cache import HeadShape, LayerShape


class HydraHeads(Heads):
    """Heads that read the tokens before theirs: the chosen one, and those that are drafted after it.

    In Hydra++, a causal layer over the target's hidden states comes first, and the heads have more layers.
    """

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__(shape, config, config.heads)
        self.token_norm = Norm(shape.embedding, EPSILON)
        self.steps = nn.ModuleList(
            nn.ModuleList(
                zero_linear(shape.width + (0 if layer else (head + 1) * shape.embedding), shape.width)
                for layer in range(config.head_layers or 1)
            )
            for head in range(config.heads)
        )

    def along(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        before = self.stages(hidden, embedded)[-1][rows, columns]
        normed, last = self.token_norm(embedded), embedded.shape[1] - 1
        path = [normed[rows, (columns + ahead).clamp_max(last)] for ahead in range(self.config.heads)]
        found = [self.state(head, before, torch.cat(path[: head + 1], dim=-1)) for head in range(self.config.heads)]
        return torch.stack(found, dim=1)

    def state(self, head: int, before: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """The states of a head ``[rows, width]`` from those before the path, and the path's normed embeddings."""
        first, *others = self._steps_of(head)
        states = before + functional.silu(first(torch.cat([before, path], dim=-1)))
        for step in others:
            states = states + functional.silu(step(states))
        return states

    def _steps_of(self, head: int) -> nn.ModuleList:
        steps = self.steps[head]
        assert isinstance(steps, nn.ModuleList)
        return steps


class MtpHeads(Heads):
    """A layer that predicts the token after the next one, and that goes on from its own hidden states.

    Its output layer is the target's, or a copy of the rows of the draft vocabulary; neither is trained.
    """

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__(shape, config, 1 if config.draft_vocabulary else 0)
        self._shared: list[OutputLayer] = []

    def share(self, output: nn.Linear) -> None:
        """Use the target's output layer, which is not among the parameters of this module."""
        self._shared = [OutputLayer.of(output)]

    def output(self, head: int) -> OutputLayer:
        return self._shared[0] if self._shared else super().output(0)

    @property
    def layer(self) -> AdaptationLayer:
        (layer,) = self.layers
        assert isinstance(layer, AdaptationLayer)
        return layer

    def along(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Each step reads the hidden states that the step before it gave, as drafting does (EAGLE-3, 2025)."""
        length = hidden.shape[1]
        rotary = self.rotary(slice(length), length, hidden)
        steps = Steps(length, hidden.device)
        states, found = hidden, []
        for step in range(self.config.heads):
            states = self.layer.attending(states, embedded, rotary, steps.attended)
            found.append(states[rows, (columns + step).clamp_max(length - 1)])
            states = functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return torch.stack(found, dim=1)

    def shapes(self) -> list[LayerShape]:
        """The shapes of what the layer keeps of a position."""
        heads, like = self.shape.attention_heads, self.like
        shape = HeadShape(heads, self.shape.width // heads, like.dtype, like.device)
        return [LayerShape(shape, shape)]

    def run(
        self, embedded: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, cache: Any, mask: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states ``[1, tokens, width]`` after embedded tokens, each with the hidden state before it."""

        def attended(keys: torch.Tensor, values: torch.Tensor) -> Attended:
            return *cache.update(keys, values, 0), mask

        rotary = self.rotary(positions[0] - 1, cache.capacity, hidden)
        return self.layer.attending(hidden, embedded, rotary, attended)


class Steps:
    """Attention in training: what the later positions of a draft see.

    In step ``s``, a position is the ``s``-th one of a draft. It attends to the positions before the draft as step 0
    computed them, and to those of the draft as the steps before it did.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._places = torch.arange(length, device=device)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attended(self, keys: torch.Tensor, values: torch.Tensor) -> Attended:
        self._keys.append(keys)
        self._values.append(values)
        step = len(self._keys) - 1
        queries, places = self._places[:, None], self._places
        masks = [places <= queries - step, *(places == queries - step + of for of in range(1, step + 1))]
        return torch.cat(self._keys, dim=-2), torch.cat(self._values, dim=-2), torch.cat(masks, dim=-1)
