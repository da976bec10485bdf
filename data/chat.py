"""From a conversation to the token ids that the model is asked with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def speaks_chat(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the model came with a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, chat: bool | None = None
) -> list[int]:
    """Token ids of a conversation, ready to be answered.

    ``chat`` None means: through the chat template if the model has one. Without a template (or
    with ``chat`` false) there must be a single message, whose text is taken as it stands.
    """
    for message in messages:
        _check_unicode(message["content"])
    if chat is None:
        chat = speaks_chat(tokenizer)
    ids = _through_template(tokenizer, messages) if chat else _as_it_stands(tokenizer, messages)
    if not ids:
        raise PromptError("the prompt gives no token at all: give some text to answer")
    return ids


def _check_unicode(text: str) -> None:
    """Half a surrogate pair, as broken bytes on a command line become, is a character to no tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise PromptError(f"the prompt is not valid Unicode ({found}): give it as UTF-8 text") from None


def _through_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    from jinja2 import TemplateError

    if not speaks_chat(tokenizer):
        raise PromptError("this model's tokenizer has no chat template: leave out --chat, or ask with --raw")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise PromptError(f"the model's chat template refuses the conversation: {error}") from None
    return _ids(tokenizer, str(text), special=False)


def _as_it_stands(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    if len(messages) != 1:
        raise PromptError(
            f"a conversation of {len(messages)} messages needs a chat template: without one, ask with a single text"
        )
    return _ids(tokenizer, messages[0]["content"], special=True)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    # verbose=False: the length is checked by us, against what the model can really take.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
