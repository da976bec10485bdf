"""The best tokens and their probabilities of a captured pass, which go to the host in one copy and one wait."""

from __future__ import annotations

import torch

from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.model.cuda_graphs import DeviceClock


class RankedBlock:
    """Memory of so many rankings on a device, and where they arrive on the host."""

    def __init__(self, rows: int, best: int, device: torch.device) -> None:
        self._shape, ranked = (rows, best), rows * best
        words = ranked + -(-ranked // 2)
        self._block = torch.zeros(words, dtype=torch.int64, device=device)
        self._host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._clock = DeviceClock(device)
        self.tokens, self.probs = self._parts_of(self._block)

    def _parts_of(self, block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ranked = self._shape[0] * self._shape[1]
        return block[:ranked].view(self._shape), block[ranked:].view(torch.float32)[:ranked].view(self._shape)

    def write(self, tokens: torch.Tensor, probs: torch.Tensor) -> None:
        """Keep the rankings of a pass in the first rows; part of what is captured."""
        rows, best = tokens.shape
        self.tokens[:rows, :best].copy_(tokens)
        self.probs[:rows, :best].copy_(probs)

    def received(self, rows: int) -> tuple[Array, Array]:
        """Wait for the pass that was started last; the first of its rankings."""
        self._clock.start()
        self._host.copy_(self._block, non_blocking=True)
        self._clock.stop()
        self._clock.seconds()  # waits
        tokens, probs = (part[:rows].numpy().copy() for part in self._parts_of(self._host))
        return tokens, probs
