"""The state of one answer in its grammar: which tokens may follow, and which must."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.data.errors import PromptError
from hdtool.runtime.sampling.sampler import NOTHING_ALLOWED
from hdtool.runtime.tree import ROOT

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


NOTHING = np.empty(0, np.bool_)


class Dictated(NamedTuple):
    """What a grammar dictates at one place."""

    certain: list[int]
    """The tokens that must follow, whatever text follows them."""
    tokens: list[int]
    """The tokens of the text that must follow; the last one may turn out otherwise, as more text may join it."""


class Guided(NamedTuple):
    """What a grammar makes of a tree, by its root and its nodes."""

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
        self._dictated: Dictated | None = None
        """What follows them, once it is computed."""

    def follow(self, answer: Sequence[int]) -> None:
        """Consume the tokens of the answer that were not consumed yet."""
        self.extend(list(answer[self.length :]))

    def extend(self, new: list[int]) -> None:
        """Consume the next tokens of the answer."""
        # Only an end token follows a complete answer.
        if new and not self._matcher.is_stopped() and not self._matcher.consume_tokens(new):
            raise self._stuck()
        self.length += len(new)
        self._dictated = None

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
        while count < len(tokens):
            # Where the text is dictated, other tokens with its bytes are forbidden.
            certain = self._matcher.compute_ff_tokens()
            some = _common(certain, tokens[count:]) if certain else tokens[count : count + 1]
            consumed = self._matcher.try_consume_tokens(some) if some else 0
            count += consumed
            if not some or consumed < len(some):
                break
        self._matcher.rollback(count)
        return count

    def _stuck(self) -> PromptError:
        reason = self._matcher.get_error().partition("\n")[0]
        return PromptError(f"the grammar cannot be followed further ({reason}): make it simpler")

    def forced_text(self) -> bytes:
        """The text that must come next."""
        return self._matcher.compute_ff_bytes()

    def forced(self) -> list[int]:
        """The tokens of the text that must come next, as far as a text of these tokens is allowed."""
        return self._dictates_next().tokens

    def _dictates_next(self) -> Dictated:
        """What follows the answer so far, computed once."""
        self._dictated = self._dictated or self._dictates()
        return self._dictated

    def _dictates(self) -> Dictated:
        certain, text = self._matcher.compute_ff_tokens(), self.forced_text()
        tokens = self._tokenizer.tokenize_bytes(text) if text else certain
        if tokens is certain or tokens[: len(certain)] != certain:
            return Dictated(certain, certain)
        return Dictated(certain, tokens[: self._matcher.validate_tokens(tokens)])

    def guided(self, tokens: npt.NDArray[Any], parents: npt.NDArray[Any]) -> Guided:
        """What the grammar makes of a tree."""
        root = self._dictates_next()
        if not len(tokens):
            return Guided(NOTHING, {ROOT: root.tokens} if root.tokens else {}, {ROOT: root.certain})
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        found = Guided(np.zeros(len(tokens), np.bool_), {}, {})
        values = tokens.tolist()

        def visit(above: int, dictated: Dictated) -> None:
            found.certain[above] = dictated.certain
            drafted = set()
            for node in children.get(above, ()):
                if not self._matcher.try_consume_tokens([values[node]]):
                    continue
                found.allowed[node] = True
                drafted.add(values[node])
                visit(node, self._dictates())
                self._matcher.rollback(1)
            if dictated.tokens and dictated.tokens[0] not in drafted:
                found.chains[above] = dictated.tokens

        visit(ROOT, root)
        return found


def _common(some: list[int], others: list[int]) -> list[int]:
    """The tokens that two lists begin with."""
    size = 0
    while size < min(len(some), len(others)) and some[size] == others[size]:
        size += 1
    return others[:size]
