"""Messages of the system in the middle of a conversation, which Claude Code and Codex send, and chat templates."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from hdtool.data.chat import conversation_text
from hdtool.runtime.integrations.server.system_messages import takes_late_instructions, with_early_instructions
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer
from tests.server.templates import ALTERNATING, DROPPING, FIRST_ONLY, TURNS


def said(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(ModelConfig())


@pytest.mark.parametrize(
    ("template", "takes"), [(TURNS, True), (None, True), (FIRST_ONLY, False), (ALTERNATING, False), (DROPPING, False)]
)
def test_templates_that_take_them(tokenizer: PreTrainedTokenizerBase, template: str | None, takes: bool) -> None:
    tokenizer.chat_template = template
    assert takes_late_instructions(tokenizer) is takes


@pytest.mark.parametrize("template", [FIRST_ONLY, ALTERNATING, DROPPING])
def test_templates_that_refuse_them_show_all_words(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    tokenizer.chat_template = template
    given = said("s1", "u1", "s2", "a1", "s3", "u2", "s4")
    text = conversation_text(tokenizer, with_early_instructions(given), chat=True)
    assert [text.index(turn["content"]) for turn in given[1:]] == sorted(
        text.index(turn["content"]) for turn in given[1:]
    )


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["s1", "u1"], ["s1", "u1"]),
        (["u1", "u2", "a1"], ["u1", "u2", "a1"]),
        (["s1", "s2", "u1", "s3"], ["s1\n\ns2", "u1\n\ns3"]),
        (["u1", "a1", "s1", "u2"], ["u1", "a1", "s1\n\nu2"]),
        (["u1", "a1", "t1", "s1"], ["u1", "a1", "t1", "s1"]),
        (["u1", "s1", "s2", "a1", "u2"], ["u1\n\ns1\n\ns2", "a1", "u2"]),
    ],
)
def test_turns_they_become_part_of(given: list[str], expected: list[str]) -> None:
    found = with_early_instructions(said(*given))
    assert [turn["content"] for turn in found] == expected
    assert all(turn["role"] != "system" for turn in found[1:])


def test_the_beginning_stays_as_a_conversation_grows() -> None:
    """Else its next turn is not read from the cache."""
    turns = said("s1", "u1", "s2", "a1", "u2", "s3", "a2")
    whole = with_early_instructions(turns)
    assert with_early_instructions(turns[:3]) == whole[:2]
    assert with_early_instructions(turns[:6]) == whole[:4]
