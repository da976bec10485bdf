"""The likeliest tokens: what the target would say at each node of a tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def likeliest(logits: torch.Tensor) -> npt.NDArray[np.int64]:
    """The token of the highest logit of each row, the first of equals; what is not a number counts as the highest."""
    if logits.device.type != "cpu":
        found: Any = logits.argmax(dim=-1).cpu().numpy()
    else:
        # On a CPU, NumPy looks through a vocabulary some ten times as fast as torch does.
        logits = logits.detach()
        comparable = logits if logits.dtype == torch.float64 else logits.float()  # NumPy has no bfloat16
        found = comparable.numpy().argmax(axis=-1)
    return np.asarray(found, np.int64)
