"""What a model thinks before its answer, between ``<think>`` and ``</think>`` as Qwen, DeepSeek and others write it."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from hdtool.runtime.stop_text import begun_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OPENING, CLOSING = "<think>", "</think>"
LINE_END = "\n"


class Place(Enum):
    START = "start"
    THINKING = "thinking"
    ANSWER = "answer"


class ThinkingReader:
    """Splits the text of an answer into reasoning and the rest while it is generated.

    The tags and the line ends beside them are left out; everything else is in one of the two texts. Tags after the
    beginning of the answer are text.
    """

    def __init__(self, prompt: str) -> None:
        """The ``prompt`` may open the reasoning itself, or close it."""
        end = prompt.rstrip()
        self._place = Place.START
        if end.endswith(OPENING):
            self._place = Place.THINKING
        elif end.endswith(CLOSING):
            self._place = Place.ANSWER
        self._held = ""
        self._skips_lines = self._place is Place.THINKING

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, prompt: str) -> ThinkingReader | None:
        """None if the chat template knows no such tags."""
        return cls(prompt) if CLOSING in str(getattr(tokenizer, "chat_template", "")) else None

    def add(self, text: str, *, is_last: bool = False) -> tuple[str, str]:
        """The plain text and the reasoning that more text completes."""
        self._held += text
        reasoning = ""
        if self._place is Place.START:
            self._read_start(is_last=is_last)
        if self._place is Place.THINKING:
            reasoning = self._read_thinking(is_last=is_last)
        return (self._taken(len(self._held)) if self._place is Place.ANSWER else ""), reasoning

    def _read_start(self, *, is_last: bool) -> None:
        begun = self._held.lstrip()
        if begun.startswith(OPENING):
            self._held, self._place, self._skips_lines = begun.removeprefix(OPENING), Place.THINKING, True
        elif is_last or not OPENING.startswith(begun):
            self._place = Place.ANSWER

    def _read_thinking(self, *, is_last: bool) -> str:
        thought, closing, rest = self._held.partition(CLOSING)
        if closing:
            self._held = thought.rstrip(LINE_END)
            reasoning = self._taken(len(self._held))
            self._held, self._place, self._skips_lines = rest, Place.ANSWER, True
            return reasoning
        if is_last:
            return self._taken(len(self._held))
        shown = self._held[: len(self._held) - begun_length(self._held, (CLOSING,))]
        return self._taken(len(shown.rstrip(LINE_END)))

    def _taken(self, length: int) -> str:
        """Take so much of the held text, without line ends after a tag."""
        taken, self._held = self._held[:length], self._held[length:]
        if self._skips_lines:
            taken = taken.lstrip(LINE_END)
            self._skips_lines = not taken
        return taken
