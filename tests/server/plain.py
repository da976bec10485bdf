"""What the model answers without a server and without drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import LogitsProcessor

from hdtool.data.chat import encode_conversation
from hdtool.runtime.answering.answer_plan import plan_answer
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.session import decode_request
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import Loaded


def plain_ids(
    loaded: Loaded,
    ids: Sequence[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    first: Sequence[LogitsProcessor] = (),
    **settings: Any,
) -> list[int]:
    config = SamplingConfig(temperature=temperature, seed=seed, **settings)
    request = plan_answer(loaded, config, ids, max_new_tokens, processors=first).request(None, NoDraft())
    return [token for step in decode_request(loaded.target, request, prefix_caching=False) for token in step.tokens]


def plain_text(loaded: Loaded, question: str, max_new_tokens: int, **settings: Any) -> str:
    ids = encode_conversation(loaded.tokenizer, [{"role": "user", "content": question}])
    return text_of(loaded.tokenizer, plain_ids(loaded, ids, max_new_tokens, **settings))


def prompt_length(loaded: Loaded, messages: Sequence[dict[str, Any]], function: dict[str, Any]) -> int:
    """Tokens of the prompt that the chat template makes of a conversation with a function."""
    render: Any = loaded.tokenizer.apply_chat_template
    tools = [{"type": "function", "function": function}]
    text = render(messages, tools=tools, add_generation_prompt=True, tokenize=False)
    return len(loaded.tokenizer(text, add_special_tokens=False)["input_ids"])
