"""Cross-entropy of an output layer, in chunks: logits of all labels at once would not fit in memory.

The gradient of the logits is known in closed form, so each chunk computes its logits once, and its gradients at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

CHUNK_BYTES = 32 * 2**20
"""Size of the float32 logits of a chunk."""


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: torch.Tensor,
        weight: torch.Tensor,
        probs: torch.Tensor,
        rows: torch.Tensor,
        labels: torch.Tensor,
        lm_weight: float,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = torch.is_autocast_enabled(states.device.type)
        dtype = torch.get_autocast_dtype(states.device.type) if half else weight.dtype
        inputs, factors = states.to(dtype), weight.to(dtype)
        state_gradient = torch.zeros_like(inputs)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        total = torch.zeros((), device=states.device)
        right = torch.zeros((), dtype=torch.int64, device=states.device)
        size = max(1, CHUNK_BYTES // (4 * len(weight)))
        for start in range(0, len(states), size):
            part = slice(start, start + size)
            logits = (inputs[part] @ factors.T).float()
            if bias is not None:
                logits += bias
            truth, label = probs[rows[part]], labels[part, None]
            right += (logits.argmax(-1, keepdim=True) == label).sum()
            norm = logits.logsumexp(-1, keepdim=True)
            total += (norm - (truth * logits).sum(-1, keepdim=True)).sum()
            total += lm_weight * (norm - logits.gather(-1, label)).sum()
            gradient = logits.sub_(norm).exp_().mul_(1 + lm_weight).sub_(truth)
            gradient.scatter_add_(-1, label, torch.full_like(norm, -lm_weight))
            narrow = gradient.to(dtype)
            state_gradient[part] = narrow @ factors
            if weight_gradient is not None:
                weight_gradient += narrow.T @ inputs[part]
        ctx.save_for_backward(state_gradient.to(states.dtype), weight_gradient)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        states, weight = ctx.saved_tensors
        return states * gradients[0], None if weight is None else weight * gradients[0], *[None] * 5


cross_entropy: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _CrossEntropy.apply
"""The summed loss of ``states @ weight.T``, and how many labels are the arg-max; arguments as in ``forward``.

The loss of a state is the cross-entropy to its row of ``probs``, plus ``lm_weight`` times that to its label. ``bias``
is added to the logits and has no gradient.
"""
