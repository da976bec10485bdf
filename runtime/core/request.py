"""The request for an answer, and how many tokens the answer may have."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hdtool.data.errors import ContextError, OptionError, PromptError
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.engine_interface import Engine, Verified
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.step import Finish

Key = TypeVar("Key")
Observer = Callable[[Accepted, Verified], None]
"""Called after each step with what was accepted and the result of the pass, with the logits of all its rows."""


@dataclass(frozen=True, eq=False)
class Request(Generic[Key]):
    """A prompt and the options for its answer."""

    key: Key
    """Value by which the caller recognizes the request in the outcomes of the session."""
    prompt: Sequence[int]
    sampler: Sampler
    drafter: Drafter = field(default_factory=NoDraft)
    """Drafter that no other request uses until this request ends."""
    stops: Container[int] = ()
    """Tokens that end this answer; if empty, the stops of the session apply."""
    prediction: Sequence[int] = ()
    """Tokens that the answer will probably contain: the drafter drafts from them, but the context excludes them."""
    max_new_tokens: int | None = None
    """Maximum number of tokens in this answer; None for the limit of the session."""
    owner: str = ""
    """Name of the tenant; cached prefixes are reused only for requests with the same owner."""
    observer: Observer | None = None


def room_for(engine: Engine[Any], prompt: Sequence[int], max_new_tokens: int) -> tuple[int, Finish]:
    """Return ``(room, finish)``: the maximum number of new tokens, and the finish reason of an answer of that length.

    Raise PromptError for an invalid prompt, its subclass ContextError if the prompt fills the context, and OptionError
    if ``max_new_tokens`` is below 1.
    """
    _check_prompt(prompt, engine.vocabulary)
    if max_new_tokens < 1:
        raise OptionError(f"max_new_tokens is {max_new_tokens}, but an answer has at least one token: give 1 or more")
    limit = engine.context_limit(len(prompt))
    if limit is None or len(prompt) + max_new_tokens <= limit:
        return max_new_tokens, Finish.LENGTH
    if len(prompt) >= limit:
        raise ContextError(len(prompt), limit)
    return limit - len(prompt), Finish.CONTEXT


def _check_prompt(prompt: Sequence[int], vocabulary: int) -> None:
    if not len(prompt):
        raise PromptError("the prompt is empty: give at least one token")
    outside = next((token for token in prompt if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise PromptError(
            f"the prompt holds token {outside}, but the model has embeddings for tokens 0 to {vocabulary - 1} only: "
            "remove the text of that token, or use the tokenizer that the model was trained with"
        )
