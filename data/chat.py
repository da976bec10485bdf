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
    if chat is None:
        chat = speaks_chat(tokenizer)
    if not chat and len(messages) != 1:
        raise PromptError(
            f"a conversation of {len(messages)} messages needs a chat template: without one, ask with a single text"
        )
    ids = encode_text(tokenizer, conversation_text(tokenizer, messages, chat=chat), special=not chat)
    if not ids:
        raise PromptError("the prompt gives no token at all: give some text to answer")
    return ids


def conversation_text(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, chat: bool, answered: bool = False
) -> str:
    """A conversation as the model reads it, up to where it answers; ``answered`` if the last message is the answer.

    Without a template a single text is left as it stands, and each of several gets a line of its own.
    """
    for message in messages:
        _check_unicode(message["content"])
    if chat:
        return _through_template(tokenizer, messages, answered)
    texts = [message["content"] for message in messages]
    return texts[0] if len(texts) == 1 else "".join(f"{text}\n" for text in texts)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Token ids of a text; ``special`` adds those that a tokenizer opens a text with."""
    # verbose=False: the length is checked by us, against what the model can really take.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def _check_unicode(text: str) -> None:
    """Half a surrogate pair, as broken bytes on a command line become, is a character to no tokenizer."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X} at character {error.start}"
        raise PromptError(f"the prompt is not valid Unicode ({found}): give it as UTF-8 text") from None


def _through_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], answered: bool) -> str:
    from jinja2 import TemplateError

    if not speaks_chat(tokenizer):
        raise PromptError("this model's tokenizer has no chat template: leave out --chat, or ask with --raw")
    try:
        text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=not answered, tokenize=False)
    except TemplateError as error:
        raise PromptError(f"the model's chat template refuses the conversation: {error}") from None
    return str(text)
