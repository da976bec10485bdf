"""The tokens that the model ranked highest at each position of a recorded answer, with their log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdtool.data.formats.row import RowError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DIGITS = 4
"""Of log-probabilities in files."""
LOWEST = -9999.0
"""In files, in place of minus infinity, which JSON lacks."""


@dataclass(frozen=True, eq=False)
class Rankings:
    """A row for each token of an answer, which was chosen from it; best first."""

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def as_json(self) -> dict[str, Any]:
        import numpy as np

        rounded = np.maximum(self.logprobs.astype(float), LOWEST).round(DIGITS)
        return {"tokens": self.tokens.tolist(), "logprobs": rounded.tolist()}

    @classmethod
    def of_json(cls, value: Any, positions: int) -> Rankings:
        """Raises a ``RowError`` unless there is a row for each of so many positions."""
        import numpy as np

        try:
            found = cls(np.array(value["tokens"], np.int32), np.array(value["logprobs"], np.float32))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RowError("`rankings` need `tokens` and `logprobs`, with equally many numbers in each row") from None
        shape = found.tokens.shape
        if len(shape) != 2 or shape != found.logprobs.shape or shape[0] != positions or not shape[1]:
            raise RowError(f"`rankings` need a row of tokens and one of logprobs for each of {positions} output_ids")
        if found.tokens.min() < 0:
            raise RowError("`rankings` hold a negative token")
        return found
