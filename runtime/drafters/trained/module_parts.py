"""What the modules of trained drafters share: a norm, and the best tokens by their logits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from hdtool.runtime.core.engine_interface import Ranked, TopTokens


class CastingNorm(nn.RMSNorm):
    """RMSNorm in the dtype of its input, so that half precision uses the fused kernel, too."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(states, self.normalized_shape, self.weight.to(states.dtype), self.eps)


def topk_tokens(logits: torch.Tensor, number: int, token_ids: torch.Tensor | None = None) -> TopTokens:
    """Return the top-k tokens of each row and their probabilities.

    ``token_ids`` maps ids of the draft vocabulary to the target's; None if the drafter uses the target's vocabulary.
    """
    best = logits.softmax(dim=-1, dtype=torch.float32).topk(min(number, logits.shape[-1]), dim=-1)
    return best.indices if token_ids is None else token_ids[best.indices], best.values


def on_host(ranked: TopTokens) -> Ranked:
    """Copy a ranking's tokens and probabilities to the host."""
    tokens, probs = ranked
    return tokens.cpu().numpy(), probs.cpu().numpy()
