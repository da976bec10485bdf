"""Grammars compiled for a model's tokenizer by ``llguidance``."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from hdtool.data.errors import OptionError, PromptError
from hdtool.data.extras import install_command
from hdtool.data.grammar import Grammar, GrammarKind
from hdtool.runtime.grammar.guide import Guide

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as ``json.dumps`` writes it. Small models that may choose white space add it without end."""
LEXER_WORK, MOST_SYMBOLS = 200_000, 500_000
"""Bounds on the work of compiling a grammar, in units of the library; they are reached within a second."""
MOST_FORCED = 20_000
"""Most bytes that a grammar may force at its start: they are drafted as a chain, and more would take seconds."""
KEPT = 64
"""Compiled grammars that are kept; a service asks for the same ones again and again."""
GBNF_RULE = "::="


class GrammarCompiler:
    """Compiles grammars for one tokenizer; the vocabulary is read once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], vocabulary: int) -> None:
        """``ends`` are the tokens that end an answer, ``vocabulary`` is the number of the model's logits."""
        try:
            from llguidance import LLParserLimits
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise OptionError(
                f"structured output needs the library llguidance: {install_command('structured')}"
            ) from None
        if not ends:
            raise PromptError("the model has no token that ends an answer, and a grammar needs one to end with")
        try:
            self._tokenizer = from_tokenizer(cast(Any, tokenizer), max(vocabulary, len(tokenizer)), sorted(ends))
        except ValueError as error:
            raise PromptError(f"grammars need a tokenizer of the library tokenizers ({error})") from None
        self.vocabulary = vocabulary
        self._limits = LLParserLimits(initial_lexer_fuel=LEXER_WORK, max_grammar_size=MOST_SYMBOLS)
        self._compiled = lru_cache(KEPT)(self._compile)

    def guide(self, grammar: Grammar) -> Guide:
        """The state of a new answer that must match the grammar; the same grammar is compiled once."""
        return Guide(self._compiled(grammar).deep_copy(), self._tokenizer)

    def bytes_of(self, token: int) -> bytes:
        """The text of a token."""
        return self._tokenizer.decode_bytes([token])

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        try:
            compiled = LLMatcher(self._tokenizer, _notation(grammar), log_level=0, limits=self._limits)
            fault = compiled.get_error() or _too_long(compiled)
        except Exception as error:  # the conversion of GBNF raises no class of its own
            fault = str(error)
        if fault:
            raise PromptError(f"the {grammar.kind.label} cannot be used ({_in_a_line(fault)}): correct it")
        return compiled


def _notation(grammar: Grammar) -> str:
    """A grammar in the notation of the library."""
    from llguidance import LLMatcher

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(json.loads(grammar.text), defaults=LAYOUT)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if GBNF_RULE in grammar.text:
        from llguidance.gbnf_to_lark import any_to_lark

        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)


def _too_long(compiled: LLMatcher) -> str:
    forced = len(compiled.compute_ff_bytes())
    return f"it begins with a text of {forced:,} bytes, and at most {MOST_FORCED:,} are possible" * (
        forced > MOST_FORCED
    )


def _in_a_line(text: str) -> str:
    return " ".join(text.partition("<state>")[0].split())[:300]
