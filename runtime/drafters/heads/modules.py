"""Modules of drafting heads, for training and for drafting.

Adaptation layers read the target's hidden states and the tokens chosen from them. Each head applies a residual block to
the output of one of these layers, auto-embedding blocks attend across the heads (Amphista; Li et al., 2024), and output
layers, which may be low-rank, compute logits. The first head predicts the token after the last chosen one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hdtool.runtime.caches.kv_cache import HeadShape, LayerShape, extent_for
from hdtool.runtime.drafters.trained.module_parts import CastingNorm
from hdtool.runtime.settings.building import HeadsConfig

Indices = slice | torch.Tensor
AttentionInputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""The keys and values to attend to, and an attention mask or None."""


NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0

RotaryTable = tuple[torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor], AttentionInputs]


@dataclass(frozen=True)
class HeadsShape:
    """Sizes of drafting heads, which depend on their target."""

    width: int
    """Width of the hidden states that the target's output layer reads."""
    vocabulary: int
    embedding: int
    """Width of the target's token embeddings."""
    attention_heads: int
    mlp: int


class Attention(nn.Module):
    """Self-attention with a residual connection, initialized to the identity."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = CastingNorm(width, NORM_EPSILON)
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.write.weight)

    def parts(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values, each ``[batch, heads, positions, head width]``."""
        read: torch.Tensor = self.read(self.norm(states))
        cut: torch.Tensor = read.unflatten(-1, (3, self.heads, -1))
        return cut.movedim(-3, 0).transpose(-3, -2).unbind(0)

    def add(self, states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        written: torch.Tensor = self.write(seen.transpose(-3, -2).flatten(-2))
        return states + written

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Attend over states ``[batch, positions, width]`` without a mask."""
        queries, keys, values = self.parts(states)
        return self.add(states, functional.scaled_dot_product_attention(queries, keys, values))


class AdaptationLayer(nn.Module):
    """A causal decoder layer that reads the layer below and, optionally, the embedding of each next token."""

    def __init__(self, shape: HeadsShape, *, sampled_token: bool) -> None:
        super().__init__()
        width = shape.width
        if sampled_token:
            self.token_norm = CastingNorm(shape.embedding, NORM_EPSILON)
            self.join = nn.Linear(width + shape.embedding, width, bias=False)
            with torch.no_grad():  # starts close to the identity on the states
                self.join.weight[:, :width].copy_(torch.eye(width))
                self.join.weight[:, width:].mul_(0.1)
        self.attention = Attention(width, shape.attention_heads)
        self.norm = CastingNorm(width, NORM_EPSILON)
        self.widen = nn.Linear(width, 2 * shape.mlp, bias=False)
        self.narrow = nn.Linear(shape.mlp, width, bias=False)
        nn.init.zeros_(self.narrow.weight)
        self.sampled_token = sampled_token

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, rotary: RotaryTable, attended: Attend | None = None
    ) -> torch.Tensor:
        """Return the layer's output at new positions; ``states`` and embedded ``tokens`` are ``[batch, new, width]``.

        Attention uses the keys, values and mask that ``attended`` returns for the keys and values of the new positions;
        without it, only the new positions are attended to.
        """
        if self.sampled_token:
            states = self.join(torch.cat([states, self.token_norm(tokens)], dim=-1))
        queries, keys, values = self.attention.parts(states)
        queries, keys = _rotated(queries, rotary), _rotated(keys, rotary)
        mask = None
        if attended is not None:
            keys, values, mask = attended(keys, values)
        causal = mask is None and queries.shape[-2] > 1
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)
        states = self.attention.add(states, seen)
        gate, wide = self.widen(self.norm(states)).chunk(2, dim=-1)
        narrowed: torch.Tensor = self.narrow(functional.silu(gate) * wide)
        return states + narrowed


class OutputLayer(nn.Module):
    """Computes the logits of one head, through a bottleneck of width ``rank`` unless ``rank`` is 0."""

    down: nn.Linear | None
    up: nn.Linear

    def __init__(self, width: int, rank: int, vocabulary: int) -> None:
        super().__init__()
        self.down = nn.Linear(width, rank, bias=False) if rank else None
        self.up = nn.Linear(rank or width, vocabulary, bias=False)

    @classmethod
    def of(cls, up: nn.Linear) -> OutputLayer:
        """Wrap the output layer of a target."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.down, made.up = None, up
        return made

    def narrowed(self, states: torch.Tensor) -> torch.Tensor:
        """Return the input of ``up``: the states, narrowed by ``down`` if there is one."""
        return self.down(states) if self.down is not None else states

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.up(self.narrowed(states).to(self.up.weight.dtype))
        return logits


class Heads(nn.Module):
    """Drafting heads of a target; subclasses define how each head computes its state."""

    def __init__(self, shape: HeadsShape, config: HeadsConfig, outputs: int) -> None:
        """``outputs`` is the number of output layers that the heads do not share with the target."""
        super().__init__()
        self.shape, self.config = shape, config
        self.layers = nn.ModuleList(
            AdaptationLayer(shape, sampled_token=config.sampled_token) for _ in range(config.adaptation)
        )
        self.vocabulary = config.draft_vocabulary or shape.vocabulary
        """Number of tokens that the heads can draft."""
        self.outputs = nn.ModuleList(OutputLayer(shape.width, config.rank, self.vocabulary) for _ in range(outputs))
        self.token_ids: torch.Tensor | None
        ids = torch.arange(self.vocabulary) if config.draft_vocabulary else None
        self.register_buffer("token_ids", ids)
        self._tables: dict[tuple[torch.device, torch.dtype, int], RotaryTable] = {}

    @property
    def like(self) -> torch.Tensor:
        """A parameter whose dtype and device new tensors should have."""
        return next(self.parameters())

    @property
    def reads_tokens(self) -> bool:
        """True if the adaptation layers read tokens besides hidden states."""
        return self.config.adaptation > 0 and self.config.sampled_token

    def output(self, head: int) -> OutputLayer:
        layer = self.outputs[head]
        assert isinstance(layer, OutputLayer)
        return layer

    def along(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        """Return the heads' states ``[places, heads, width]`` at places in texts, with the text after each as a draft.

        Place ``i`` is at ``rows[i]`` and ``columns[i]``. ``hidden`` and ``embedded`` are ``[rows, columns, width]``:
        hidden states, and embeddings of the next tokens.
        """
        raise NotImplementedError

    def shapes(self) -> list[LayerShape]:
        """Return the shapes of the tensors that each adaptation layer caches per position."""
        heads, like = self.shape.attention_heads, self.like
        shape = HeadShape(heads, self.shape.width // heads, like.dtype, like.device)
        return [LayerShape(shape, shape)] * len(self.layers)

    def stages(
        self,
        hidden: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        cache: Any = None,
        mask: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Return the inputs of the heads: each adaptation layer's output or, without layers, the hidden states.

        With a KV cache, ``positions`` ``[1, new]`` are those of the hidden states, and ``mask`` covers all that the
        cache returns.
        """
        if not self.layers:
            return [hidden]
        new = hidden.shape[-2]
        rotary = self.rotary(
            slice(new) if positions is None else positions[0], new if cache is None else cache.capacity, hidden
        )
        stage_states, states = [], hidden
        for place, layer in enumerate(self.layers):
            attended = None if cache is None else partial(_attended, cache, mask, place)
            states = layer(states, tokens, rotary, attended)
            stage_states.append(states)
        return stage_states

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits ``[heads, places, draft vocabulary]`` from states ``[places, heads, width]``."""
        return torch.stack([self.output(head)(states[:, head]) for head in range(self.config.heads)])

    def rotary(self, indices: Indices, bound: int, like: torch.Tensor) -> RotaryTable:
        """Return the rotary cosines and sines at positions ``indices``, which are all below ``bound``."""
        size = extent_for(bound)
        key = like.device, like.dtype, size
        if key not in self._tables:
            # Keep shorter tables, because captured passes read them.
            self._tables[key] = _rotary_table(size, self.shape.width // self.shape.attention_heads, like)
        cosines, sines = self._tables[key]
        return cosines[indices], sines[indices]


class ParallelHeads(Heads):
    """Amphista and Medusa heads, which all draft at once and so cannot read drafted tokens."""

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__(shape, config, config.heads)
        width, number = shape.width, config.heads
        self.steps = nn.ModuleList(zero_linear(width, width) for _ in range(number))
        self.positions = nn.Parameter(torch.zeros(number, width)) if config.positions else None
        self.auto_embedding = nn.ModuleList(
            Attention(width, shape.attention_heads) for _ in range(config.auto_embedding)
        )

    def along(
        self, hidden: torch.Tensor, embedded: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
    ) -> torch.Tensor:
        return self.states([stage[rows, columns] for stage in self.stages(hidden, embedded)])

    def states(self, stages: list[torch.Tensor]) -> torch.Tensor:
        """Return the heads' states ``[positions, heads, width]``; each of ``stages`` is ``[positions, width]``."""
        number = len(self.steps)
        mine = (stages[head * len(stages) // number] for head in range(number))
        states = torch.stack(
            [start + functional.silu(step(start)) for start, step in zip(mine, self.steps, strict=True)], dim=1
        )
        if self.positions is not None:
            states = states + self.positions
        for block in self.auto_embedding:
            states = block(states)
        return states


class HydraHeads(Heads):
    """Heads, each of which reads the token chosen by the target and all drafted tokens before the one that it predicts.

    Hydra++ puts a causal layer over the target's hidden states before the heads, which have more layers.
    """

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__(shape, config, config.heads)
        self.token_norm = CastingNorm(shape.embedding, NORM_EPSILON)
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
        outputs = [self.state(head, before, torch.cat(path[: head + 1], dim=-1)) for head in range(self.config.heads)]
        return torch.stack(outputs, dim=1)

    def state(self, head: int, before: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
        """Return a head's states ``[rows, width]``.

        Each row of ``path`` holds normalized embeddings of a draft path, and ``before`` the state before this path.
        """
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
    """A layer that predicts the token after the next one, then further tokens from its own hidden states.

    The module shares the target's output layer or, with a draft vocabulary, holds a copy of that layer's rows for the
    vocabulary's tokens. Neither is trained.
    """

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__(shape, config, 1 if config.draft_vocabulary else 0)
        self._shared: list[OutputLayer] = []

    def share(self, output: nn.Linear) -> None:
        """Use the target's output layer without registering it as a submodule."""
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
        """Return the states of ``config.heads`` steps, each of which reads the previous step's hidden states.

        This simulates drafting during training, as EAGLE-3 (2025) does.
        """
        length = hidden.shape[1]
        rotary = self.rotary(slice(length), length, hidden)
        steps = TrainingSteps(length, hidden.device)
        states, outputs = hidden, []
        for step in range(self.config.heads):
            states = self.layer(states, embedded, rotary, steps.attended)
            outputs.append(states[rows, (columns + step).clamp_max(length - 1)])
            states = functional.pad(states, (0, 0, 1, 0))[:, :-1]
        return torch.stack(outputs, dim=1)


class TrainingSteps:
    """Accumulates keys, values and masks while training unrolls a draft from every position at once.

    In step ``s``, each position stands for the ``s``-th position of a draft. It attends to the positions before the
    draft as step 0 computed them, and to each position of the draft as its own step computed it.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self._places = torch.arange(length, device=device)
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def attended(self, keys: torch.Tensor, values: torch.Tensor) -> AttentionInputs:
        self._keys.append(keys)
        self._values.append(values)
        step = len(self._keys) - 1
        queries, places = self._places[:, None], self._places
        masks = [places <= queries - step, *(places == queries - step + ahead for ahead in range(1, step + 1))]
        return torch.cat(self._keys, dim=-2), torch.cat(self._values, dim=-2), torch.cat(masks, dim=-1)


def zero_linear(width: int, out: int) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def _attended(
    cache: Any, mask: torch.Tensor | None, layer: int, keys: torch.Tensor, values: torch.Tensor
) -> AttentionInputs:
    """Write new keys and values of a layer; return all keys and values to attend to, and the mask."""
    return *cache.update(keys, values, layer), mask


def _rotary_table(size: int, width: int, like: torch.Tensor) -> RotaryTable:
    speeds = ROTARY_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(size, dtype=torch.float64)[:, None] * torch.cat([speeds, speeds])
    sines = angles.sin()
    sines[:, : width // 2] *= -1
    return angles.cos().to(like), sines.to(like)


def _rotated(states: torch.Tensor, rotary: RotaryTable) -> torch.Tensor:
    cosines, sines = rotary
    return states * cosines + states.roll(states.shape[-1] // 2, dims=-1) * sines
