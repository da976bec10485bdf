"""Passes of trained drafters, which read integers and rank tokens, captured once per shape."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdtool.runtime.engines.capture import Capture, Run
from hdtool.runtime.engines.cuda.cuda_graphs import CapturedRun, is_out_of_memory
from hdtool.runtime.engines.cuda.static_steps import DeviceClock, rankings_in
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.model.pass_inputs import TransferBuffer

CAPTURED_SIZES = (1, 2, 4, 8, 16)
"""Numbers of rows in a captured pass."""
WORDS_PER_ROW = 6
"""Maximum number of integers that a captured pass reads for each of its rows."""
Shape = tuple[str, int, int]
"""Kind of a pass, number of its rows, and the number of cached positions that it reads or the depth of its rows."""
TopTokens = tuple[torch.Tensor, torch.Tensor]
"""Best tokens after each row or of each head, and their probabilities."""
Ranked = tuple[Array, Array]
"""Best tokens and their probabilities as arrays on the host."""


class RankingPasses:
    """Runs passes that read integers and rank tokens, with one copy to the device and one from it.

    If passes are captured, there is one captured pass per shape.
    """

    def __init__(self, capture: Capture | None, device: torch.device, rankings: int, best: int) -> None:
        """``rankings`` and ``best`` are the maximum numbers of rankings, and of tokens in each.

        ``capture`` is None if passes aren't captured.
        """
        self._capture, self._device = capture, device
        self._captured: dict[Shape, CapturedRun] = {}
        self._clock = DeviceClock(device)
        self.largest = CAPTURED_SIZES[-1]
        """Maximum number of rows in a captured pass."""
        self._rankings, self._best, self._max_best = max(rankings, self.largest), best, best
        ranked = self._rankings * best
        self._input = TransferBuffer(1 + WORDS_PER_ROW * self._rankings, device)
        self._output = TransferBuffer(ranked + -(-ranked // 2), device)

    def captures(self, rows: int) -> bool:
        return self._capture is not None and rows <= self.largest

    def size_for(self, rows: int) -> int:
        """Return the number of rows to which a pass over ``rows`` rows must be padded."""
        return next(size for size in CAPTURED_SIZES if size >= rows) if self.captures(rows) else rows

    def forget(self) -> None:
        """Release all captured passes."""
        self._captured.clear()

    def run(self, shape: Shape, words: list[int], rankings: int, rank: Callable[[torch.Tensor], TopTokens]) -> Ranked:
        """Return the first ``rankings`` that ``rank`` computes from ``words``.

        ``shape``, which begins with the kind and the number of rows, determines the number of words and all else that
        ``rank`` reads on the host.
        """
        given, number = torch.tensor(words), len(words)
        if self.captures(shape[1]):
            self._input.host[:number] = given
            self._input.send(number)
            if run := self._run_of(shape, lambda: self._write(rank(self._input.device[:number]))):
                run()
                return self._wait(rankings)
        tokens, probs = (part[:rankings].cpu().numpy() for part in rank(given.to(self._device)))
        return tokens, probs

    def _run_of(self, shape: Shape, run: Run) -> Run | None:
        """Return a pass as captured; None if memory is short, or always if it can't be captured."""
        captured = self._captured.get(shape)
        if captured is None or captured.is_due():
            assert self._capture is not None
            captured = self._captured[shape] = CapturedRun()
            try:
                captured.capture(self._capture, run)
            except Exception as error:  # model code that cannot be captured may raise any error
                if not is_out_of_memory(error):
                    self._capture = None
        return captured.run

    def _write(self, ranked: TopTokens) -> None:
        rows, self._best = ranked[0].shape
        for part, values in zip(self._parts_of(self._output.device), ranked, strict=True):
            part[:rows, : self._best].copy_(values)

    def _wait(self, rankings: int) -> Ranked:
        self._clock.start()
        self._output.fetch(len(self._output.host))
        self._clock.stop()
        self._clock.seconds()  # waits
        tokens, probs = (part[:rankings, : self._best].numpy().copy() for part in self._parts_of(self._output.host))
        return tokens, probs

    def _parts_of(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rankings_in(words, self._rankings, self._max_best)
