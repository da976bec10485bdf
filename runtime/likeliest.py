"""The likeliest tokens: what the target would say at each node of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

BLOCK = 64
"""Logits that are compared with the least of the best at once."""
NO_TOKEN, NO_LOGIT = -1, -np.inf

Array = npt.NDArray[Any]


class Logits(torch.Tensor):
    """Logits of a step that has looked for the likeliest tokens already."""

    # What is computed from them is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    likeliest: npt.NDArray[np.int64]

    @classmethod
    def of(cls, logits: torch.Tensor, likeliest: npt.NDArray[np.int64]) -> Logits:
        """The same memory."""
        known = logits.as_subclass(cls)
        known.likeliest = likeliest
        return known


def likeliest(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The token of the highest logit of each row, the first of equals; what is not a number counts as the highest."""
    if isinstance(logits, Logits):
        return logits.likeliest
    if logits.device.type != "cpu":
        found: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        # On a CPU, NumPy looks through a vocabulary some ten times as fast as torch does.
        logits = logits.detach()
        comparable = logits if logits.dtype == torch.float64 else logits.float()  # NumPy has no bfloat16
        found = comparable.numpy().argmax(axis=-1)
    return np.asarray(found, np.int64)


@torch.inference_mode()
def ranked(logits: torch.Tensor, most: int) -> tuple[Array, Array]:
    """The ``most`` likeliest tokens of each row, best first, and their logits; -1 and -inf where a row has no more."""
    tokens = np.full((len(logits), most), NO_TOKEN, np.int64)
    scores = np.full((len(logits), most), NO_LOGIT, np.float32)
    if logits.device.type == "cpu":
        # Torch takes ten times as long for this on a CPU.
        _rank(logits.detach().float().numpy(), tokens, scores)
    else:
        best = logits.float().topk(min(most, logits.shape[-1]))
        # Both in one transfer: each costs a wait for the device.
        both = torch.stack([best.values, best.indices.to(torch.int32).view(torch.float32)]).cpu().numpy()
        scores[:, : both.shape[2]] = both[0]
        tokens[:, : both.shape[2]] = both[1].view(np.int32)
    return tokens, scores


@njit(cache=True, nogil=True)
def _rank(logits: Array, tokens: Array, scores: Array) -> None:
    """Most blocks have nothing to offer, as one quick look tells."""
    for row in range(len(logits)):
        least = scores[row, -1]
        for start in range(0, logits.shape[1], BLOCK):
            block = logits[row, start : start + BLOCK]
            better = 0
            for place in range(len(block)):
                better += block[place] > least
            if better:
                for place in range(len(block)):
                    if block[place] > least:
                        _insert(tokens[row], scores[row], start + place, block[place])
                        least = scores[row, -1]


@njit(cache=True, nogil=True)
def _insert(tokens: Array, scores: Array, token: int, score: float) -> None:
    place = len(scores)
    while place > 0 and scores[place - 1] < score:
        place -= 1
        if place + 1 < len(scores):
            tokens[place + 1], scores[place + 1] = tokens[place], scores[place]
    if place < len(scores):
        tokens[place], scores[place] = token, score
