"""Render conversations with chat templates and encode them as token ids."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hdtool.data.errors import PromptError, ToolsError, lone_surrogate
from hdtool.data.prompts import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


LINE_END = "\n"
Variables = Mapping[str, Any]
"""Additional variables for a chat template, such as ``enable_thinking``."""
NO_VARIABLES: Variables = {}
RESERVED_VARIABLES = {"self", "messages", "conversations", "raise_exception", "strftime_now"}
"""Variable names that the user cannot set, in addition to the parameters of ``apply_chat_template``."""


def has_chat_template(tokenizer: PreTrainedTokenizerBase) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def with_system(prompt: Prompt, text: str) -> Prompt:
    """Return the prompt preceded by a system message; raise PromptError if the prompt already begins with one."""
    if prompt.messages[0]["role"] == "system":
        prompt_name = f"prompt {prompt.id}" if prompt.id else "the prompt"
        raise PromptError(f"{prompt_name} has a system message of its own: leave out --system, or remove that message")
    return replace(prompt, messages=({"role": "system", "content": text}, *prompt.messages))


def encode_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> list[int]:
    """Encode a prompt as token ids; raise PromptError if there are none, or if the chat template refuses the prompt.

    If ``chat`` is None, the tokenizer's chat template is used if there is one. Without a template, there must be a
    single message, whose text is the prompt, and no tools. ``tools`` are passed to the template.
    """
    return read_conversation(tokenizer, messages, chat=chat, tools=tools)[1]


def read_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat: bool | None = None,
    tools: Sequence[dict[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> tuple[str, list[int]]:
    """Return a prompt's rendered text and its token ids; errors are those of ``encode_conversation``."""
    if chat is None:
        chat = has_chat_template(tokenizer)
    if tools and not chat:
        raise PromptError("tools need a chat template, which presents them to the model: leave out --raw and the tools")
    if not chat and len(messages) != 1:
        raise PromptError(
            f"a conversation of {len(messages)} messages needs a chat template: without one, give a single text"
        )
    text = conversation_text(tokenizer, messages, chat=chat, tools=tools, variables=variables)
    ids = encode_text(tokenizer, text, special=not chat)
    if not ids:
        raise PromptError("the prompt has no tokens: give some text to answer")
    return text, ids


def conversation_text(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    chat: bool,
    answered: bool = False,
    tools: Sequence[dict[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> str:
    """Return the text of a prompt or, if ``answered`` is True, of a conversation whose last message is the answer.

    If ``chat`` is False, a single message is returned unchanged, and several messages are joined, each with a newline.
    Raise PromptError if the text is not valid Unicode, or if the chat template is missing or refuses the messages.
    """
    for message in messages:
        if fault := lone_surrogate(message["content"]):
            raise PromptError(f"the prompt is not valid Unicode ({fault}): give it as UTF-8 text")
    if chat:
        return _templated(tokenizer, messages, answered, tools, variables)
    texts = [message["content"] for message in messages]
    return texts[0] if len(texts) == 1 else "".join(f"{text}\n" for text in texts)


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Return the token ids of a text, with the tokenizer's special tokens, such as BOS, if ``special`` is True."""
    # verbose=False: hdtool checks the length itself, against the model's context.
    return list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])


def encode_answer(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    text: str,
    *,
    chat: bool | None = None,
    variables: Variables = NO_VARIABLES,
) -> list[int]:
    """Return the token ids that the model would generate for an answer with this text, without the token that ends it.

    These ids may differ from the ids of the text alone, because a tokenizer may prefix a text with a space, and a
    template may put a space before the answer. An empty text gives an empty list.
    """
    if not text:
        return []
    chat = has_chat_template(tokenizer) if chat is None else chat
    prompt_text = conversation_text(tokenizer, messages, chat=chat, variables=variables)
    answer = _rendered_answer(tokenizer, messages, text, prompt_text, variables) if chat else text
    for before, after in ((prompt_text, answer), (LINE_END, text)):
        ids = encode_text(tokenizer, before, special=not chat)
        whole = encode_text(tokenizer, before + after, special=not chat)
        # A token may span the boundary between the two texts.
        if whole[: len(ids)] == ids:
            return whole[len(ids) :]
    return encode_text(tokenizer, text, special=False)


def _rendered_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], text: str, prompt_text: str, variables: Variables
) -> str:
    """Return the answer as the chat template renders it: stripped, and after the characters that precede an answer.

    Return ``text`` unchanged if the template rejects or alters it, or renders the prompt differently before it.
    """
    try:
        answered = [*messages, {"role": "assistant", "content": text}]
        whole = _templated(tokenizer, answered, answered=True, variables=variables)
    except PromptError:
        return text
    before, answer, _ = whole.removeprefix(prompt_text).partition(text.strip())
    return before + answer if answer and whole.startswith(prompt_text) else text


def _templated(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    answered: bool,
    tools: Sequence[dict[str, Any]] = (),
    variables: Variables = NO_VARIABLES,
) -> str:
    from jinja2 import TemplateError

    if not has_chat_template(tokenizer):
        raise PromptError("this model's tokenizer has no chat template: leave out --chat, or use --raw")
    reserved = RESERVED_VARIABLES.union(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := next((name for name in variables if name in reserved), None):
        raise PromptError(f"{taken!r} is no variable of a chat template: leave it out")
    settings = {"add_generation_prompt": not answered, "tokenize": False, **variables}
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tools=list(tools) or None, **settings))
        if tools and text == tokenizer.apply_chat_template(list(messages), **settings):
            raise ToolsError
    except (TemplateError, TypeError, ValueError) as error:  # a template may take messages to have another form
        raise PromptError(f"the model's chat template refuses the conversation: {error}") from None
    return text
