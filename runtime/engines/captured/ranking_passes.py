"""Passes of trained drafters, which read integers and rank tokens, captured once per shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hdtool.runtime.core.engine_interface import Ranked, TopTokens
from hdtool.runtime.engines.captured.device_clock import DeviceClock
from hdtool.runtime.engines.captured.static_steps import rankings_in
from hdtool.runtime.engines.captured_functions import Capture, CapturedRuns
from hdtool.runtime.model.pass_inputs import TransferBuffer

CAPTURED_SIZES = (1, 2, 4, 8, 16)
"""Numbers of rows in a captured pass."""
WORDS_PER_ROW = 6
"""Maximum number of integers that a captured pass reads for each of its rows."""
Shape = tuple[str, int, int]
"""Kind of a pass, number of its rows, and the number of cached positions that it reads or the depth of its rows."""


class RankingPasses:
    """Runs passes that read integers and rank tokens, with one copy to the device and one from it.

    If passes are captured, there is one captured pass per shape.
    """

    def __init__(
        self,
        capture: Capture | None,
        device: torch.device,
        rankings: int,
        best: int,
        changes: Callable[[], int] = lambda: 0,
    ) -> None:
        """``rankings`` and ``best`` are the maximum numbers of rankings, and of tokens in each.

        ``capture`` is None if passes aren't captured. ``changes`` counts changes to the model, whose weights passes
        may read: after one, captured passes are released, because they would read freed memory.
        """
        self._device, self._changes = device, changes
        self._captured = CapturedRuns[Shape, int](capture) if capture else None
        """Captured passes, which return the number of tokens in each ranking; None if passes can't be captured."""
        self._read: tuple[object, ...] = (changes(),)
        """The number of changes to the model, and what ``read_from`` got last."""
        self._clock = DeviceClock(device)
        self.largest = CAPTURED_SIZES[-1]
        """Maximum number of rows in a captured pass."""
        self._rankings, self._best = max(rankings, self.largest), best
        ranked = self._rankings * best
        self._input = TransferBuffer(1 + WORDS_PER_ROW * self._rankings, device)
        self._output = TransferBuffer(ranked + -(-ranked // 2), device)

    def captures(self, rows: int) -> bool:
        return self._captured is not None and not self._captured.has_failed and rows <= self.largest

    def size_for(self, rows: int) -> int:
        """Return the number of rows to which a pass over ``rows`` rows must be padded."""
        return next(size for size in CAPTURED_SIZES if size >= rows) if self.captures(rows) else rows

    def forget(self) -> None:
        """Release all captured passes."""
        if self._captured:
            self._captured.clear()

    def read_from(self, *places: object) -> None:
        """Release captured passes if the model or ``places``, such as a cache's tensors, aren't those of last time."""
        if self._read != (read := (self._changes(), *places)):
            self.forget()
            self._read = read

    def run(self, shape: Shape, words: list[int], rankings: int, rank: Callable[[torch.Tensor], TopTokens]) -> Ranked:
        """Return the first ``rankings`` that ``rank`` computes from ``words``; see ``start``."""
        return self.start(shape, words, rankings, rank)()

    def start(
        self, shape: Shape, words: list[int], rankings: int, rank: Callable[[torch.Tensor], TopTokens]
    ) -> Callable[[], Ranked]:
        """Start to compute rankings from ``words``; return a function that waits for the first ``rankings`` of them.

        ``shape``, which begins with the kind and the number of rows, determines the number of words and all else that
        ``rank`` reads on the host. Without a captured pass, the rankings are computed before this method returns.
        """
        given, number = torch.tensor(words), len(words)
        self.read_from(*self._read[1:])
        if self._captured is not None and self.captures(shape[1]):
            self._input.host[:number] = given
            self._input.send(number)
            captured = self._captured.of_any(shape, lambda: self._write(rank(self._input.device[:number])))
            if captured and captured.run:
                captured.run()
                self._clock.start()
                self._output.fetch(len(self._output.host))
                self._clock.stop()
                return partial(self._wait, rankings, captured.output)
        tokens, probs = (part[:rankings].cpu().numpy() for part in rank(given.to(self._device)))
        return lambda: (tokens, probs)

    def _write(self, ranked: TopTokens) -> int:
        rows, best = ranked[0].shape
        for part, values in zip(self._parts_of(self._output.device), ranked, strict=True):
            part[:rows, :best].copy_(values)
        return best

    def _wait(self, rankings: int, best: int | None) -> Ranked:
        self._clock.seconds()  # waits
        tokens, probs = (part[:rankings, :best].numpy().copy() for part in self._parts_of(self._output.host))
        return tokens, probs

    def _parts_of(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rankings_in(words, self._rankings, self._best)
