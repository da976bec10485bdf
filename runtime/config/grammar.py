"""What an answer must match."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hdtool.data.errors import OptionError
from hdtool.data.grammar import Grammar, GrammarKind, read_grammar
from hdtool.runtime.config.setting import Settings, setting


@dataclass(frozen=True)
class GrammarConfig(Settings):
    """Structured output: one of these forms, for all answers."""

    json_schema: Path | None = setting(None, "File with a JSON schema that answers must follow.")
    regex: str | None = setting(None, "Regular expression that answers must match as a whole.")
    grammar: Path | None = setting(None, "File with a grammar for answers, in Lark's notation or in GBNF.")

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [kind for kind in GrammarKind if getattr(self, kind.value) is not None]
        if len(given) > 1:
            names = " and ".join(f"--{kind.value.replace('_', '-')}" for kind in given)
            raise OptionError(f"{names} exclude each other: give one of them")

    def read(self) -> Grammar | None:
        """The grammar; None for free text."""
        if self.regex is not None:
            return Grammar.regex(self.regex)
        for kind in (GrammarKind.JSON_SCHEMA, GrammarKind.GRAMMAR):
            if path := getattr(self, kind.value):
                return read_grammar(kind, path)
        return None
