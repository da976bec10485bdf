"""Structured output: compiles grammars with ``llguidance``, masks forbidden tokens and drafts forced ones."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers import LogitsProcessor

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Grammar, GrammarKind
from hdtool.runtime.core.drafter import Drafter, NoDraft, WrappedDrafter
from hdtool.runtime.core.prefix_cache import common_prefix_length
from hdtool.runtime.core.sampler import NOTHING_ALLOWED
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, UNDETERMINED, DraftTree
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.settings.draft_sources import SourceId

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions
    from transformers import PreTrainedTokenizerBase

NO_NODES = np.empty(0, np.bool_)


class ForcedTokens(NamedTuple):
    """The tokens that a grammar forces at one position."""

    certain: list[int]
    """Tokens that must follow, however the text continues."""
    tokens: list[int]
    """Tokenization of the text that must follow; the last token is uncertain, because it may merge with later text."""


class GuidedTree(NamedTuple):
    """What a grammar allows and forces in a draft tree; the dictionaries' keys are nodes, or ``ROOT``."""

    allowed: npt.NDArray[np.bool_]
    """True for each node that is allowed and whose ancestors are all allowed."""
    chains: dict[int, list[int]]
    """Forced tokens to append below a node, if none of its allowed children drafts the first of them."""
    certain: dict[int, list[int]]
    """Tokens that must follow a node, however the text continues."""


class Guide:
    """Matches one answer against a grammar, and holds the state after the tokens consumed so far."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self.length = 0
        """Number of tokens of the answer that have been consumed."""
        self._forced: ForcedTokens | None = None
        """Forced tokens at this position; None until they are computed."""

    def follow(self, answer: Sequence[int]) -> None:
        """Consume those tokens of the answer that have not been consumed yet; raise PromptError as ``extend`` does."""
        self.extend(list(answer[self.length :]))

    def extend(self, new: list[int]) -> None:
        """Consume the next tokens of the answer; raise PromptError if the grammar cannot be followed further."""
        # Only an end token follows a complete answer.
        if new and not self._matcher.is_stopped() and not self._matcher.consume_tokens(new):
            raise self._stuck()
        self.length += len(new)
        self._forced = None

    def bits(self) -> npt.NDArray[np.uint8]:
        """Return a bitmask of the tokens that may come next, eight per byte, lowest bit first.

        Raise PromptError if computing it exceeds a limit.
        """
        bitmask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise self._stuck()
        return bitmask

    def forbidden(self, device: torch.device, size: int) -> torch.Tensor:
        """Return a bool tensor ``[size]`` that is True for each token that may not come next.

        Raise PromptError if no token may come next, or if computing this exceeds a limit.
        """
        is_forbidden = np.unpackbits(~self.bits(), bitorder="little")[:size].view(np.bool_)
        if len(is_forbidden) < size:  # a model may have more logits than its tokenizer has tokens
            is_forbidden = np.pad(is_forbidden, (0, size - len(is_forbidden)), constant_values=True)
        if is_forbidden.all():
            raise PromptError(NOTHING_ALLOWED)
        return torch.from_numpy(is_forbidden).to(device)

    def allowed(self, tokens: list[int]) -> int:
        """Return how many leading ``tokens`` the grammar allows, one after another, without computing a mask."""
        count, matcher = 0, self._ahead()
        while count < len(tokens):
            # Where the grammar forces tokens, other tokens with the same bytes are forbidden.
            certain = matcher.compute_ff_tokens()
            some = tokens[count : count + (common_prefix_length(certain, tokens[count:]) if certain else 1)]
            consumed = matcher.try_consume_tokens(some) if some else 0
            count += consumed
            if not some or consumed < len(some):
                break
        return count

    def _ahead(self) -> LLMatcher:
        """Return a copy of the matcher for looking ahead, because ``rollback`` does not undo an exceeded limit."""
        return self._matcher.deep_copy()

    def _stuck(self) -> PromptError:
        reason = self._matcher.get_error().partition("\n")[0]
        return PromptError(f"the grammar cannot be followed further ({reason}): make it simpler")

    def forced(self) -> list[int]:
        """Return the tokens of the text that must come next, stopping before the first one that is not allowed."""
        return self._forced_tokens().tokens

    def _forced_tokens(self) -> ForcedTokens:
        """Return the forced tokens at this position, computed once per position."""
        self._forced = self._forced or self._compute_forced(self._ahead())
        return self._forced

    def _compute_forced(self, matcher: LLMatcher) -> ForcedTokens:
        certain, text = matcher.compute_ff_tokens(), matcher.compute_ff_bytes()
        tokens = self._tokenizer.tokenize_bytes(text) if text else certain
        if tokens is certain or tokens[: len(certain)] != certain:
            return ForcedTokens(certain, certain)
        return ForcedTokens(certain, tokens[: matcher.validate_tokens(tokens)])

    def constrain_tree(self, tokens: npt.NDArray[Any], parents: npt.NDArray[Any]) -> GuidedTree:
        """Return what the grammar allows and forces in a tree that starts at this position."""
        root = self._forced_tokens()
        if not len(tokens):
            return GuidedTree(NO_NODES, {ROOT: root.tokens} if root.tokens else {}, {ROOT: root.certain})
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents.tolist()):
            children.setdefault(parent, []).append(node)
        guided_tree = GuidedTree(np.zeros(len(tokens), np.bool_), {}, {})
        values, matcher = tokens.tolist(), self._ahead()

        def visit(above: int, dictated: ForcedTokens) -> None:
            guided_tree.certain[above] = dictated.certain
            drafted = set()
            for node in children.get(above, ()):
                if not matcher.try_consume_tokens([values[node]]):
                    continue
                guided_tree.allowed[node] = True
                drafted.add(values[node])
                visit(node, self._compute_forced(matcher))
                matcher.rollback(1)
            if dictated.tokens and dictated.tokens[0] not in drafted:
                guided_tree.chains[above] = dictated.tokens

        visit(ROOT, root)
        return guided_tree


JSON_LAYOUT: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON on one line, as ``json.dumps`` writes it. If whitespace is unrestricted, small models may emit it endlessly."""
MAX_LEXER_WORK, MAX_SYMBOLS = 200_000, 500_000
"""Limits on the work of compiling a grammar, in llguidance's units; compilation reaches them within a second."""
MAX_ITEMS_IN_ROW, MAX_ITEMS_IN_STEP = 500, 20_000
"""Limits on the parser's items after one lexeme and in one token's mask, which grow with the ambiguity of a grammar.

An answer ends with an error if it exceeds them, because it would delay all answers of a server: with 1,000 items in a
row, by seconds. This excludes objects with over 124 optional fields, which take 4 items each, and more than about 100
characters of white space in a row if their rule is right-recursive.
"""
MAX_FORCED_BYTES = 20_000
"""Maximum number of bytes that a grammar may force at its start; drafting more as a chain would take seconds."""
MAX_COMPILED_GRAMMARS = 64
"""Size of the LRU cache of compiled grammars; servers get the same grammars again and again."""
GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, whose vocabulary is read at the first grammar."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Collection[int], vocabulary: int) -> None:
        """``ends`` are the tokens that end an answer, and ``vocabulary`` is the model's number of logits."""
        self._text_tokenizer, self._ends, self.vocabulary = tokenizer, ends, vocabulary
        self._compiled = lru_cache(MAX_COMPILED_GRAMMARS)(self._compile)
        self._lock = threading.Lock()

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        if not self._ends:
            raise PromptError("the model has no token that ends an answer, and a grammar needs one to end with")
        tokenizer: Any = self._text_tokenizer
        try:
            return from_tokenizer(tokenizer, max(self.vocabulary, len(tokenizer)), sorted(self._ends))
        except ValueError as error:
            raise PromptError(f"grammars need a tokenizer of the library tokenizers ({error})") from None

    def guide(self, grammar: Grammar) -> Guide:
        """Return a guide for an answer; raise PromptError for an unusable grammar. Compiled grammars are cached."""
        with self._lock:  # a server prepares several requests at once
            return Guide(self._compiled(grammar).deep_copy(), self._tokenizer)

    def guide_for(self, grammar: Grammar | None) -> Guide | None:
        """Return a guide for an answer that must match ``grammar``, as ``guide`` does; None without a grammar."""
        return self.guide(grammar) if grammar else None

    def _compile(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        tokenizer = self._tokenizer
        limits = LLParserLimits(
            initial_lexer_fuel=MAX_LEXER_WORK,
            max_grammar_size=MAX_SYMBOLS,
            max_items_in_row=MAX_ITEMS_IN_ROW,
            step_max_items=MAX_ITEMS_IN_STEP,
        )
        try:
            compiled = LLMatcher(tokenizer, _notation(grammar), log_level=0, limits=limits)
            fault = compiled.get_error()
            if not fault and (forced := len(compiled.compute_ff_bytes())) > MAX_FORCED_BYTES:
                fault = f"it begins with a text of {forced:,} bytes, and at most {MAX_FORCED_BYTES:,} are possible"
        except Exception as error:  # the GBNF conversion raises no specific exception class
            fault = str(error)
        if fault:
            on_one_line = " ".join(fault.partition("<state>")[0].split())[:300]
            raise PromptError(f"the {grammar.kind.label} cannot be used ({on_one_line}): correct it")
        return compiled


def _notation(grammar: Grammar) -> str:
    """Return a grammar in llguidance's notation."""
    from llguidance import LLMatcher

    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(json.loads(grammar.text), defaults=JSON_LAYOUT)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if GBNF_RULE.search(grammar.text):
        from llguidance.gbnf_to_lark import any_to_lark

        return LLMatcher.grammar_from_lark(any_to_lark(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)


def masks_of(guide: Guide | None) -> list[LogitsProcessor]:
    """Return a list with a processor that masks forbidden tokens, or an empty list if there is no grammar."""
    return [GrammarProcessor(guide)] if guide else []


class GrammarProcessor(LogitsProcessor):
    """Logits processor for one answer that sets the scores of tokens that a grammar forbids to minus infinity."""

    def __init__(self, guide: Guide) -> None:
        self._guide = guide
        self._prompt_length: int | None = None
        """Number of prompt tokens, padding included; None before the first call."""

    def allowed(self, context: Sequence[int], tokens: list[int]) -> int:
        """Return how many leading ``tokens`` the grammar allows after the context, without computing a mask."""
        self._follow(context)
        return self._guide.allowed(tokens)

    def bits(self, context: Sequence[int]) -> Array:
        self._follow(context)
        return self._guide.bits()

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self._follow(input_ids[0])
        forbidden = self._guide.forbidden(scores.device, scores.shape[-1])
        return cast(torch.FloatTensor, scores.masked_fill(forbidden, -torch.inf))

    def _follow(self, context: Sequence[int] | torch.Tensor) -> None:
        if self._prompt_length is None:
            self._prompt_length = len(context) - self._guide.length
        new = context[self._prompt_length + self._guide.length :]
        self._guide.extend(new.tolist() if isinstance(new, torch.Tensor) else list(new))


def guided_drafter(drafter: Drafter, guide: Guide | None, draft_tokens: int | None = None) -> Drafter:
    """Return a drafter whose trees follow a grammar, or ``drafter`` itself in plain decoding or without a grammar.

    Forced tokens are added to a tree until it has ``draft_tokens`` nodes, by default ``LARGEST_TREE``.
    """
    if guide is None or isinstance(drafter, NoDraft) or draft_tokens == 0:
        return drafter
    return GuidedDrafter(drafter, guide, LARGEST_TREE if draft_tokens is None else draft_tokens)


class GuidedDrafter(WrappedDrafter):
    """Adapts another drafter's trees to a grammar for one answer: drops forbidden nodes and adds forced tokens."""

    def __init__(self, drafter: Drafter, guide: Guide, max_nodes: int = LARGEST_TREE) -> None:
        """Forced tokens are added to a tree until it has ``max_nodes`` nodes."""
        super().__init__(drafter)
        self._guide, self._max_nodes = guide, min(max_nodes, LARGEST_TREE)
        self._prompt_length = 0
        self._spent = 0.0

    @property
    def seconds(self) -> dict[SourceId, float]:
        return {**super().seconds, SourceId.GRAMMAR: self._spent}

    def begin(self, prompt: Sequence[int]) -> None:
        self._prompt_length = len(prompt)
        super().begin(prompt)

    def draft(self, context: Sequence[int]) -> DraftTree:
        started = time.perf_counter()
        try:
            self._guide.follow(context[self._prompt_length :])
        except PromptError:  # the answer ends when the next token is chosen; other answers of the batch go on
            return DraftTree.bare(context[-1])
        self._drafter.expect(self._guide.forced()[: self._max_nodes])
        self._spent += time.perf_counter() - started
        drafted = self._drafter.draft(context)
        started = time.perf_counter()
        tree = self._constrain(drafted)
        if tree is not drafted:
            self._drafter.forget_tree()
        self._spent += time.perf_counter() - started
        return tree

    def _constrain(self, tree: DraftTree) -> DraftTree:
        """Return the tree without forbidden nodes and with forced chains, added below the most probable nodes first."""
        guided_tree = self._guide.constrain_tree(tree.tokens, tree.parents)
        if guided_tree.allowed.all() and not guided_tree.chains:
            return DraftTree(
                tree.root, tree.tokens, tree.parents, tree.sources, _certain(len(tree), guided_tree.certain)
            )
        chains, certain = guided_tree.chains, dict(guided_tree.certain)
        if not guided_tree.allowed.all():
            order = np.flatnonzero(guided_tree.allowed)
            tree = tree.select(order)
            places = {int(node): place for place, node in enumerate(order)}
            chains, certain = (
                {places.get(node, ROOT): tokens for node, tokens in by_node.items()} for by_node in (chains, certain)
            )
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        for node in sorted(chains):  # nodes are sorted by descending probability
            above, dictated = node, certain[node]
            for place, token in enumerate(chains[node][: max(0, self._max_nodes - len(tokens))]):
                tokens.append(token)
                parents.append(above)
                above = len(tokens) - 1
                certain[above] = dictated[place + 1 : place + 2]
        added = np.full(len(tokens) - len(tree), SourceId.GRAMMAR, np.uint8)
        return DraftTree(
            tree.root,
            np.array(tokens, np.int64),
            np.array(parents, np.int32),
            np.concatenate([tree.sources, added]),
            _certain(len(tokens), certain),
        )


def _certain(nodes: int, certain_by_node: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return, for the root and each node, the token that must follow; ``UNDETERMINED`` where several may follow."""
    tokens = np.full(1 + nodes, UNDETERMINED, np.int64)
    for node, dictated in certain_by_node.items():
        if dictated:
            tokens[1 + node] = dictated[0]
    return tokens
