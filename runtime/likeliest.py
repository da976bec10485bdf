"""The likeliest tokens: what the target would say at each node of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


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
