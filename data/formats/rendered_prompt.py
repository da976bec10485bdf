"""Messages in a prompt that a chat template has rendered, as servers log it."""

from __future__ import annotations

import re

TURNS = (
    # ChatML, Llama 3, Gemma: the start of a turn with its role, the text, the end.
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(
        r"(?:<\|begin_of_text\|>)?<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"(?:<bos>)?<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
)


def messages_in(prompt: str) -> list[dict[str, str]] | None:
    """The messages before the answer; None unless the whole prompt is one of the known templates."""
    for turn in TURNS:
        found = list(turn.finditer(prompt))
        if not found or "".join(match[0] for match in found) != prompt:
            continue
        messages = [{"role": match["role"], "content": match["text"]} for match in found]
        # The last turn is the start of the answer.
        return messages[:-1] if not messages[-1]["content"].strip() else messages
    return None
