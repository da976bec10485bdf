"""The modules of drafting heads: what they compute, in training and in drafting alike.

Adaptation layers read the target's hidden states and the tokens that were chosen from them; each head takes
a stage of them a step further; the auto-embedding block lets the heads look at each other; low-rank output
layers make logits of it. The first head speaks of the token behind the one that was chosen last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from hdtool.runtime.config import HeadsConfig
from hdtool.runtime.drafters.heads.kv_cache import HeadsKVCache, Places, Rows
from hdtool.runtime.model.static_steps import extent_for

EPSILON = 1e-6
TURNING = 10_000.0
"""The base of rotary positions."""

Turns = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class HeadsShape:
    """What heads take over from their target."""

    width: int
    """Of the hidden states that the target's output layer reads."""
    vocabulary: int
    embedding: int
    """Width of the target's token embeddings."""
    attention_heads: int
    mlp: int


class Norm(nn.RMSNorm):
    """In the type of what it is given, so that half precision takes the fast way, too."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


class Attention(nn.Module):
    """Attention with a residual connection, without one effect before it has learned something."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = Norm(width, EPSILON)
        self.read = nn.Linear(width, 3 * width, bias=False)
        self.write = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.write.weight)

    def parts(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values, each ``[batch, heads, rows, width of a head]``."""
        read: torch.Tensor = self.read(self.norm(states))
        cut: torch.Tensor = read.unflatten(-1, (3, self.heads, -1))
        return cut.movedim(-3, 0).transpose(-3, -2).unbind(0)

    def add(self, states: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        written: torch.Tensor = self.write(seen.transpose(-3, -2).flatten(-2))
        return states + written

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """All rows of ``[batch, rows, width]`` look at all."""
        queries, keys, values = self.parts(states)
        return self.add(states, functional.scaled_dot_product_attention(queries, keys, values))


class AdaptationLayer(nn.Module):
    """A causal decoder layer, fed with what the layer below knows and with the token that was chosen."""

    def __init__(self, shape: HeadsShape, *, sampled_token: bool) -> None:
        super().__init__()
        width = shape.width
        if sampled_token:
            self.token_norm = Norm(shape.embedding, EPSILON)
            self.join = nn.Linear(width + shape.embedding, width, bias=False)
            with torch.no_grad():  # begins as what the layer below knows
                self.join.weight[:, :width].copy_(torch.eye(width))
                self.join.weight[:, width:].mul_(0.1)
        self.attention = Attention(width, shape.attention_heads)
        self.norm = Norm(width, EPSILON)
        self.widen = nn.Linear(width, 2 * shape.mlp, bias=False)
        self.narrow = nn.Linear(shape.mlp, width, bias=False)
        nn.init.zeros_(self.narrow.weight)
        self.sampled_token = sampled_token

    def forward(
        self, states: torch.Tensor, tokens: torch.Tensor, turns: Turns, rows: Rows | None, layer: int
    ) -> torch.Tensor:
        """``states`` and embedded ``tokens`` are ``[batch, rows, width]``; older ones are in ``rows``."""
        if self.sampled_token:
            states = self.join(torch.cat([states, self.token_norm(tokens)], dim=-1))
        queries, keys, values = self.attention.parts(states)
        queries, keys = _turned(queries, turns), _turned(keys, turns)
        mask = None
        if rows is not None:
            keys, values, mask = rows.update(layer, keys, values)
        causal = mask is None and queries.shape[-2] > 1
        seen = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, is_causal=causal)
        states = self.attention.add(states, seen)
        gate, wide = self.widen(self.norm(states)).chunk(2, dim=-1)
        narrowed: torch.Tensor = self.narrow(functional.silu(gate) * wide)
        return states + narrowed


class OutputLayer(nn.Module):
    """Logits of one head: through a bottleneck of ``rank``, or in full."""

    down: nn.Linear | None
    up: nn.Linear

    def __init__(self, shape: HeadsShape, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(shape.width, rank, bias=False) if rank else None
        self.up = nn.Linear(rank or shape.width, shape.vocabulary, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.up(self.down(states) if self.down is not None else states)
        return logits


class Heads(nn.Module):
    """All drafting heads of a target."""

    def __init__(self, shape: HeadsShape, config: HeadsConfig) -> None:
        super().__init__()
        self.shape, self.config = shape, config
        width, number = shape.width, config.heads
        self.layers = nn.ModuleList(
            AdaptationLayer(shape, sampled_token=config.sampled_token) for _ in range(config.adaptation)
        )
        self.steps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(number))
        for step in self.steps:
            assert isinstance(step, nn.Linear)
            nn.init.zeros_(step.weight)
        self.positions = nn.Parameter(torch.zeros(number, width)) if config.positions else None
        self.auto_embedding = nn.ModuleList(
            Attention(width, shape.attention_heads) for _ in range(config.auto_embedding)
        )
        self.outputs = nn.ModuleList(OutputLayer(shape, config.rank) for _ in range(number))
        self._tables: dict[tuple[torch.device, torch.dtype, int], Turns] = {}

    @property
    def like(self) -> torch.Tensor:
        """One of the weights, to make others like."""
        return next(self.parameters())

    @property
    def reads_tokens(self) -> bool:
        return self.config.adaptation > 0 and self.config.sampled_token

    def stages(self, hidden: torch.Tensor, tokens: torch.Tensor, rows: Rows | None = None) -> list[torch.Tensor]:
        """The states that the heads start from: one for each adaptation layer, or the target's own."""
        if not self.layers:
            return [hidden]
        new = hidden.shape[-2]
        places, reach = (rows.places(new), rows.reach(new)) if rows is not None else (slice(new), new)
        turns = self._turns(places, reach, hidden)
        found, states = [], hidden
        for place, layer in enumerate(self.layers):
            states = layer(states, tokens, turns, rows, place)
            found.append(states)
        return found

    def states(self, stages: list[torch.Tensor]) -> torch.Tensor:
        """What each head knows ``[places, heads, width]``, of stages at some places ``[places, width]``."""
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

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """``[heads, places, vocabulary]``."""
        return torch.stack([output(states[:, head]) for head, output in enumerate(self.outputs)])

    def ahead(self, hidden: torch.Tensor, tokens: torch.Tensor, rows: HeadsKVCache) -> torch.Tensor:
        """Logits ``[heads, vocabulary]`` behind new rows ``[rows, width]`` of a conversation, which ``rows`` keeps."""
        stages = [stage[0, -1:] for stage in self.stages(hidden[None], tokens[None], rows)]
        if self.layers:
            rows.length += len(hidden)
        return self.logits(self.states(stages))[:, 0]

    def _turns(self, places: Places, reach: int, like: torch.Tensor) -> Turns:
        """Cosines and sines of positions below ``reach``."""
        size = extent_for(reach)
        key = like.device, like.dtype, size
        if key not in self._tables:
            # Shorter ones are kept: a pass that is recorded goes on reading them.
            self._tables[key] = _table(size, self.shape.width // self.shape.attention_heads, like)
        cosines, sines = self._tables[key]
        return cosines[places], sines[places]


def best_of(logits: torch.Tensor, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens of each row, and their shares."""
    logits = logits.float()
    best = logits.topk(number, dim=-1)
    return best.indices, (best.values - logits.logsumexp(dim=-1, keepdim=True)).exp()


def _table(size: int, width: int, like: torch.Tensor) -> Turns:
    speeds = TURNING ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(size, dtype=torch.float64)[:, None] * torch.cat([speeds, speeds])
    sines = angles.sin()
    sines[:, : width // 2] *= -1
    return angles.cos().to(like), sines.to(like)


def _turned(states: torch.Tensor, turns: Turns) -> torch.Tensor:
    cosines, sines = turns
    return states * cosines + states.roll(states.shape[-1] // 2, dims=-1) * sines
