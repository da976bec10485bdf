"""Grammars: what an answer must match, from options, from a line of a prompts file, or from OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from hdtool.data.errors import PromptError

RESPONSE_FORMAT = "response_format"
LARGEST_GRAMMAR = 1 << 20
"""Bytes; a larger one takes minutes to compile."""


class GrammarKind(StrEnum):
    """How a grammar is written. The value names its option and its key in a prompts file."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"

    @property
    def label(self) -> str:
        """The kind in messages."""
        return {"json_schema": "JSON schema", "regex": "regular expression"}.get(self.value, self.value)


@dataclass(frozen=True)
class Grammar:
    """What an answer must match as a whole."""

    kind: GrammarKind
    text: str

    def __post_init__(self) -> None:
        name = f"the {self.kind.label}"
        if not self.text.strip():
            raise PromptError(f"{name} is empty: leave it out for free text")
        if len(self.text) > LARGEST_GRAMMAR:
            raise PromptError(f"{name} has {len(self.text):,} characters: {LARGEST_GRAMMAR:,} are the most")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """JSON that is valid by a schema, which is given as an object or as its text."""
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(found, ensure_ascii=False)
        except (ValueError, TypeError, RecursionError) as error:
            raise PromptError(f"the JSON schema is not valid JSON ({error}): correct it") from None
        if not isinstance(found, Mapping | bool):
            raise PromptError(f"the JSON schema is {type(found).__name__}: a schema is an object, true or false")
        return cls(GrammarKind.JSON_SCHEMA, text)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Text that a regular expression matches from its start to its end."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def of(cls, text: str) -> Grammar:
        """Text of a context-free grammar in Lark's notation, or in llama.cpp's GBNF."""
        return cls(GrammarKind.GRAMMAR, text)


def read_grammar(kind: GrammarKind, path: Path) -> Grammar:
    """The grammar in a file."""
    from hdtool.data.inputs import text_in

    text = text_in(path, "give it as UTF-8 text")
    try:
        return Grammar.json_schema(text) if kind is GrammarKind.JSON_SCHEMA else Grammar(kind, text)
    except PromptError as error:
        raise PromptError(f"{path}: {error}") from None


def grammar_of(row: Mapping[str, Any], where: str) -> Grammar | None:
    """The grammar of a row of a prompts file, by the key of a kind or by OpenAI's ``response_format``."""
    given = [kind for kind in GrammarKind if row.get(kind.value) is not None]
    wanted = _of_response_format(row.get(RESPONSE_FORMAT), where)
    if len(given) + (wanted is not None) > 1:
        names = [kind.value for kind in given] + [RESPONSE_FORMAT] * (wanted is not None)
        raise PromptError(f"{where}: {' and '.join(names)} exclude each other: give one of them")
    if not given:
        return wanted
    (kind,) = given
    value = row[kind.value]
    try:
        if kind is GrammarKind.JSON_SCHEMA:
            return Grammar.json_schema(value)
        if not isinstance(value, str):
            raise PromptError(f"`{kind.value}` must be a text, got {type(value).__name__}")
        return Grammar(kind, value)
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None


def _of_response_format(value: Any, where: str) -> Grammar | None:
    if value is None or value == {"type": "text"}:
        return None
    if value == {"type": "json_object"}:
        return Grammar.json_schema({"type": "object"})
    described = value.get("json_schema") if isinstance(value, dict) and value.get("type") == "json_schema" else None
    if not isinstance(described, dict) or "schema" not in described:
        raise PromptError(
            f'{where}: `{RESPONSE_FORMAT}` must be {{"type": "json_object"}} or '
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
        )
    return Grammar.json_schema(described["schema"])
