"""The state of one answer in its grammar: which tokens may follow, and which must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import PromptError
from hdtool.runtime.sampling.sampler import NOTHING_ALLOWED

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Guided(NamedTuple):
    """What a grammar makes of a tree; node -1 is the root."""

    allowed: npt.NDArray[np.bool_]
    """Which nodes it allows."""
    chains: dict[int, list[int]]
    """The chains that it forces below nodes without them."""
    certain: dict[int, list[int]]
    """The tokens that must follow a node, whatever text follows them."""


class Guide:
    """A grammar after the tokens of an answer so far."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self.length = 0
        """Tokens of the answer that were consumed."""

    def follow(self, answer: Sequence[int]) -> None:
        """Consume the tokens of the answer that were not consumed yet."""
        self.extend(list(answer[self.length :]))

    def extend(self, new: list[int]) -> None:
        """Consume the next tokens of the answer."""
        # Only an end token follows a complete answer.
        if new and not self._matcher.is_stopped() and not self._matcher.consume_tokens(new):
            raise self._stuck()
        self.length += len(new)

    def bits(self) -> npt.NDArray[np.uint8]:
        """A bit for each token that may come next, eight in a number, the first one in the lowest."""
        found = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._stuck()
        return found

    def forbidden(self, device: torch.device, size: int) -> torch.Tensor:
        """Which of the first ``size`` tokens may not come next."""
        found = np.unpackbits(~self.bits(), bitorder="little")[:size].view(np.bool_)
        if len(found) < size:  # a model may have more logits than its tokenizer has tokens
            found = np.pad(found, (0, size - len(found)), constant_values=True)
        if found.all():
            raise PromptError(NOTHING_ALLOWED)
        return torch.from_numpy(found).to(device)

    def allowed(self, tokens: list[int]) -> int:
        """How many of these tokens may come next, one after another, without the mask of all tokens."""
        count = 0
        for token in tokens:
            # Where the text is dictated, other tokens with its bytes are forbidden.
            forced = self._matcher.compute_ff_tokens()
            if (forced and forced[0] != token) or not self._matcher.try_consume_tokens([token]):
                break
            count += 1
        self._matcher.rollback(count)
        return count

    def _stuck(self) -> PromptError:
        reason = self._matcher.get_error().partition("\n")[0]
        return PromptError(f"the grammar cannot be followed further ({reason}): make it simpler")

    def forced_text(self) -> bytes:
        """The text that must come next."""
        return self._matcher.compute_ff_bytes()

    def forced(self) -> list[int]:
        """The tokens of the text that must come next; the last one may turn out otherwise, as more text may join it."""
        return self._forced(self._matcher.compute_ff_tokens())

    def _forced(self, certain: list[int]) -> list[int]:
        """The same, which begins with the tokens that are certain."""
        text = self.forced_text()
        if not text:
            return certain
        tokens = self._tokenizer.tokenize_bytes(text)
        if tokens[: len(certain)] != certain:
            return certain
        return tokens[: self._matcher.validate_tokens(tokens)]

    def guided(self, tokens: npt.NDArray[Any], parents: npt.NDArray[Any]) -> Guided:
        """What the grammar makes of a tree."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        found = Guided(np.zeros(len(tokens), np.bool_), {}, {})
        values = tokens.tolist()

        def visit(above: int) -> None:
            found.certain[above] = certain = self._matcher.compute_ff_tokens()
            forced = self._forced(certain)
            drafted = set()
            for node in children.get(above, ()):
                if not self._matcher.try_consume_tokens([values[node]]):
                    continue
                found.allowed[node] = True
                drafted.add(values[node])
                visit(node)
                self._matcher.rollback(1)
            if forced and forced[0] not in drafted:
                found.chains[above] = forced

        visit(-1)
        return found
