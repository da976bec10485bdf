"""The heads of DSpark drafters, with which the tokens of a DFlash drafter's block depend on each other.

To the logits of a position, a Markov head adds a bias of low rank that the token before determines (Cheng et al.,
2026). Its authors draft one path from left to right; here, the same block yields a tree, in which every path has the
bias of its own tokens.
"""

from __future__ import annotations

import torch
from torch import nn

from hdtool.runtime.core.engine_interface import TopTokens
from hdtool.runtime.drafters.trained.draft_module import ROWS_PER_PASS
from hdtool.runtime.drafters.trained.module_parts import topk_tokens
from hdtool.runtime.drafters.trained.path_drafting import rank_best_paths
from hdtool.runtime.drafters.trained.proposal import MAX_RANKINGS, TOKENS_PER_RANKING

VANILLA, GATED, RNN = MARKOV_KINDS = "vanilla", "gated", "rnn"
"""Kinds of Markov heads: the bias depends on the token before; on this token and the position's hidden state; or on all
tokens of the path and that state."""
MAX_POSITIONS = 1 + (MAX_RANKINGS - 1) // ROWS_PER_PASS
"""Maximum number of positions of a block for which tokens are ranked."""


class MarkovHead(nn.Module):
    """Computes the bias of a position's logits from the token before; names of parameters are those of checkpoints."""

    def __init__(self, kind: str, tokens: int, drafted: int, rank: int, width: int) -> None:
        """``tokens`` and ``drafted`` are the sizes of the target's and the drafter's vocabulary.

        ``width`` is that of the hidden states.
        """
        super().__init__()
        self._kind = kind
        self.markov_w1, self.markov_w2 = nn.Embedding(tokens, rank), nn.Linear(rank, drafted, bias=False)
        if kind == GATED:
            self.gate_proj = nn.Linear(width + rank, rank)
        elif kind == RNN:
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)

    def read(
        self, embedded: torch.Tensor, hidden: torch.Tensor, memory: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factor ``[paths, rank]`` of each path's bias, and each path's memory after the position.

        ``embedded`` are the rows of ``markov_w1`` of the tokens before, and ``hidden`` the position's hidden states,
        both by path. The memory before the block is 0, and only an ``RNN`` head changes it.
        """
        if self._kind == GATED:
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1))) * embedded, memory
        if self._kind == RNN:
            joint = self.joint_proj(torch.cat([memory, embedded, hidden], dim=-1))
            gate, candidate, output = joint.chunk(3, dim=-1)
            return torch.tanh(output), torch.lerp(torch.tanh(candidate), memory, torch.sigmoid(gate))
        return embedded, memory


class DSparkHeads(nn.Module):
    """A Markov head and, in most drafters, a confidence head."""

    def __init__(self, markov: MarkovHead, confidence: nn.Linear | None) -> None:
        super().__init__()
        self.markov_head = markov
        self.confidence_head = nn.ModuleDict({"proj": confidence}) if confidence else None

    def rank(
        self, root: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor | None
    ) -> TopTokens:
        """Rank the tokens after the root ``[1]`` and after the most probable paths below it, on the device.

        ``hidden`` are the states of the block, and ``logits`` those of its last positions, for which tokens are
        ranked; see ``rank_best_paths``.
        """
        memory = hidden.new_zeros((1, self.markov_head.markov_w1.embedding_dim))
        skipped = len(hidden) - len(logits)

        def read(position: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, ...]:
            nonlocal memory
            embedded, states = self.markov_head.markov_w1(tokens), hidden[position].expand(len(tokens), -1)
            factor, memory = self.markov_head.read(embedded, states, memory[parents])
            return embedded, states, factor

        def extend(depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> TopTokens:
            embedded, states, factor = read(skipped + depth, tokens, parents)
            best, probs = topk_tokens(logits[depth] + self.markov_head.markov_w2(factor), TOKENS_PER_RANKING, token_ids)
            return best, probs * self._confidence(states, embedded)

        origin = torch.zeros_like(root)
        for position in range(skipped):
            read(position, root, origin)
        return rank_best_paths(extend(0, root, origin), len(logits) - 1, extend)

    def _confidence(self, states: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor | float:
        """Return, for each path, the predicted share of the position's drafts that are accepted."""
        if self.confidence_head is None:
            return 1.0
        head = self.confidence_head["proj"]
        features = torch.cat([states, embedded], dim=-1)[:, : head.in_features]
        return torch.sigmoid(head(features).float())
