"""Structured output: answers match their grammar, equal plain decoding under its mask, and drafts obey it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.cli.app import run
from hdtool.data.errors import OptionError, PromptError
from hdtool.data.prompts import Grammar, Prompt, grammar_of
from hdtool.runtime.answering.answer_plan import compiler_for
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.core.accept import accept
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode_request
from hdtool.runtime.core.step import Finish
from hdtool.runtime.core.tree import LARGEST_TREE, UNDETERMINED, DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.engines.cpu import tree_pass
from hdtool.runtime.engines.cpu.pass_kernel import compute_trees
from hdtool.runtime.generation.grammar import GrammarCompiler, Guide, GuidedDrafter, guided_drafter, masks_of
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.integrations.server.logit_processors import LogprobRecorder
from hdtool.runtime.integrations.server.openai_formats import TokenLogprobs
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.support.grammars import LARGE_GRAMMARS
from tests.support.json_schemas import JSON_SCHEMAS

MAX_NEW_TOKENS = 120
FEW = ("sentiment", "nested customer", "tool choice", "unicode keys", "user interface", "matrix")
NO_STORES = StoresConfig("none", "none")
MODEL = ModelConfig()
ASKED = "Tom has 3 boxes with 12 pencils each. Answer in JSON."
METHODS = ("ar", "hd", "hd+logitspec", "pld", "lade", "logitspec")


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(MODEL)


@pytest.fixture(scope="module")
def compiler(embedded: Loaded) -> GrammarCompiler:
    return compiler_for(embedded)


class OracleMask(LogitsProcessor):
    """The mask of a schema, computed anew from the whole answer at each token."""

    def __init__(self, loaded: Loaded, schema: Any, asked: int) -> None:
        self._tokenizer = from_tokenizer(cast(Any, loaded.tokenizer), eos_token=sorted(loaded.stops))
        layout: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        self._grammar = LLMatcher.grammar_from_json_schema(schema, defaults=layout)
        self._asked = asked

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        matcher = LLMatcher(self._tokenizer, self._grammar)
        assert matcher.consume_tokens(input_ids[0, self._asked :].tolist()), matcher.get_error()
        bias = np.frombuffer(matcher.compute_logit_bias(), np.uint8)[: scores.shape[-1]]
        forbidden = torch.from_numpy(bias == 0)
        scores[:, : len(forbidden)] = scores[:, : len(forbidden)].masked_fill(forbidden, -torch.inf)
        return scores


def asked_for(schema: Any, **more: Any) -> Prompt:
    return Prompt(({"role": "user", "content": ASKED},), grammar=Grammar.json_schema(schema), **more)


def answers(
    method: str, schemas: Sequence[Any], temperature: float = 0.0, batch: int = 1, nodes: int | None = 12
) -> list[Any]:
    decoding = DecodeConfig(method, MAX_NEW_TOKENS, draft_tokens=None if method == "ar" else nodes, batch_size=batch)
    sampling = SamplingConfig(temperature=temperature, seed=3)
    answerer = Answerer(MODEL, decoding, sampling, stores=NO_STORES)
    found = []
    for answer in answerer.all_answers([asked_for(schema) for schema in schemas]):
        list(answer)
        found.append(answer)
    return found


@cache
def plain_answers(temperature: float) -> list[Any]:
    return answers("ar", [JSON_SCHEMAS[name] for name in FEW], temperature)


def check_valid(answer: Any, schema: Any) -> None:
    """Whether the whole answer is JSON with the keys and the values that the schema names."""
    if answer.stats.finish is not Finish.STOP:
        assert answer.stats.finish is Finish.LENGTH
        return
    value = json.loads(answer.text)
    if "properties" in schema:
        assert set(schema["required"]) <= value.keys() <= schema["properties"].keys()
        for name, part in schema["properties"].items():
            if name in value and "enum" in part:
                assert value[name] in part["enum"]


@pytest.mark.parametrize("name", FEW)
@pytest.mark.one_in(2)
def test_a_token_that_is_called_allowed_is_one_that_the_mask_allows(
    name: str, embedded: Loaded, compiler: GrammarCompiler
) -> None:
    """At each place of an answer, for all tokens of the vocabulary, end tokens included."""
    plain = plain_answers(0.0)[FEW.index(name)]
    guide = compiler.guide(Grammar.json_schema(JSON_SCHEMAS[name]))
    size = embedded.target.vocabulary
    for token in embedded.tokenizer.encode(plain.text, add_special_tokens=False)[:20]:
        allowed = ~guide.forbidden(torch.device("cpu"), size)
        called = torch.tensor([guide.allowed([one]) == 1 for one in range(size)])
        assert torch.equal(called & ~allowed, torch.zeros(size, dtype=torch.bool))
        assert called[sorted(embedded.stops)].equal(allowed[sorted(embedded.stops)])
        assert called.sum() >= allowed.sum() - len(embedded.stops)
        guide.extend([token])


def test_masks_are_computed_only_where_the_grammar_changes_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "nested customer"
    expected = plain_answers(0.0)[FEW.index(name)].text
    masks: list[int] = []
    bits = Guide.bits

    def counted(guide: Guide) -> Any:
        masks.append(guide.length)
        return bits(guide)

    monkeypatch.setattr(Guide, "bits", counted)
    for method in ("ar", "hd"):
        masks.clear()
        found = answers(method, [JSON_SCHEMAS[name]])[0]
        assert found.text == expected
        assert 0 < len(masks) < found.stats.tokens


def test_the_answer_is_that_of_generate_under_the_mask(embedded: Loaded) -> None:
    for name, plain in zip(FEW, plain_answers(0.0), strict=True):
        asked = plain.prompt_tokens
        prompt: Any = embedded.tokenizer.apply_chat_template(
            [{"role": "user", "content": ASKED}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert prompt["input_ids"].shape[1] == asked
        expected = embedded.target.model.generate(
            **prompt,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            logits_processor=LogitsProcessorList([OracleMask(embedded, JSON_SCHEMAS[name], asked)]),
        )
        assert plain.output_ids == expected[0, asked:].tolist(), name


@pytest.mark.each_value
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS[1:])
def test_drafts_change_no_answer(method: str, temperature: float) -> None:
    schemas = [JSON_SCHEMAS[name] for name in FEW]
    plain = plain_answers(temperature)
    drafted = answers(method, schemas, temperature)
    assert [answer.output_ids for answer in drafted] == [answer.output_ids for answer in plain]
    for answer, schema in zip(drafted, schemas, strict=True):
        check_valid(answer, schema)
    assert sum(answer.stats.steps for answer in drafted) < sum(answer.stats.steps for answer in plain)


def test_batches_give_the_same_answers() -> None:
    schemas = [JSON_SCHEMAS[name] for name in FEW]
    plain = plain_answers(0.0)
    assert [one.output_ids for one in answers("hd", schemas, batch=3)] == [one.output_ids for one in plain]


class TestCertainTokens:
    """Where the grammar leaves one token, it is taken without logits, unless somebody reads these."""

    @pytest.fixture
    def skipped(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Rows of each pass whose logits are not computed."""
        rows: list[int] = []
        usual = compute_trees

        def counted(*given: Any) -> bool:
            rows.append(int((given[5] != UNDETERMINED).sum()))  # the only token that may follow each row
            return usual(*given)

        monkeypatch.setattr(tree_pass, "compute_trees", counted)
        return rows

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_their_logits_are_not_computed(self, temperature: float, skipped: list[int]) -> None:
        (answer,) = answers("hd", [JSON_SCHEMAS["nested customer"]], temperature)
        assert answer.output_ids == plain_answers(temperature)[FEW.index("nested customer")].output_ids
        assert sum(skipped) > answer.stats.tokens / 4

    @pytest.mark.parametrize("method", ["hd+logitspec", "logitspec"])
    def test_a_drafter_that_reads_logits_gets_all(self, method: str, skipped: list[int]) -> None:
        answers(method, [JSON_SCHEMAS["sentiment"]])
        assert skipped and not any(skipped)

    def test_recorded_logprobs_are_those_of_plain_decoding(
        self, embedded: Loaded, compiler: GrammarCompiler, skipped: list[int]
    ) -> None:
        prompt = embedded.tokenizer.encode(ASKED)

        def logprobs(drafter: Drafter) -> list[TokenLogprobs]:
            found: list[TokenLogprobs] = []
            guide = compiler.guide(Grammar.json_schema(JSON_SCHEMAS["sentiment"]))
            sampler = Sampler(SamplingConfig(), prompt, processors=LogitsProcessorList(masks_of(guide)))
            drafter, observer = guided_drafter(drafter, guide, 12), LogprobRecorder(2, found)
            request = Request(None, prompt, sampler, drafter, embedded.stops, max_new_tokens=40, observer=observer)
            steps = decode_request(embedded.target, request)
            assert sum(len(step.tokens) for step in steps) == len(found)
            return found

        plain, drafted = logprobs(NoDraft()), logprobs(Hierarchy())
        assert [one.token for one in drafted] == [one.token for one in plain]
        assert [one.logprob for one in drafted] == pytest.approx([one.logprob for one in plain], abs=1e-4)
        assert skipped and not any(skipped)

    @pytest.mark.parametrize(
        ("after_mask", "expected"),
        [
            ([], True),
            ([TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)], True),
            ([NoBadWordsLogitsProcessor([[5]])], False),
            ([TopKLogitsWarper(20, filter_value=-1.0)], False),
        ],
    )
    def test_no_other_processor_may_forbid_them(
        self, after_mask: list[LogitsProcessor], expected: bool, compiler: GrammarCompiler
    ) -> None:
        masks = masks_of(compiler.guide(Grammar.regex("a+")))

        def takes(*processors: LogitsProcessor) -> bool:
            sampler = Sampler(SamplingConfig(), [1], processors=LogitsProcessorList(processors))
            return sampler.shortcuts.takes_the_only_token

        assert takes(*masks, *after_mask) is expected
        assert not takes(*after_mask), "no mask"
        assert not takes(TopKLogitsWarper(20), *masks), "top-k may have removed the token"

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_a_row_that_overflowed_ends_the_step(self, temperature: float, compiler: GrammarCompiler) -> None:
        guide = compiler.guide(Grammar.regex("a+"))
        (first,) = (~guide.forbidden(torch.device("cpu"), compiler.vocabulary)).nonzero()[:1, 0].tolist()
        sampler = Sampler(SamplingConfig(temperature=temperature), [1], processors=LogitsProcessorList(masks_of(guide)))
        tree = replace(DraftTree.of(1, [first], [-1]), forced_tokens=np.array([first, first]))
        logits = torch.full((2, compiler.vocabulary), -torch.inf)
        logits[0, first], logits[1, first] = 0.0, torch.nan
        accepted = accept(tree, Verified(logits), sampler, max_tokens=9)
        assert accepted is not None
        assert (accepted.path, accepted.tokens) == ([], [first])


@pytest.mark.long
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.exhaustive), 0.8])
def test_all_schemas(temperature: float) -> None:
    schemas = list(JSON_SCHEMAS.values())
    plain = answers("ar", schemas, temperature)
    drafted = answers("hd", schemas, temperature, nodes=None)
    assert [answer.output_ids for answer in drafted] == [answer.output_ids for answer in plain]
    for answer, schema in zip(plain, schemas, strict=True):
        check_valid(answer, schema)


def test_what_the_schema_forces_is_drafted_by_the_grammar() -> None:
    (answer,) = answers("hd", [JSON_SCHEMAS["moderation"]], nodes=32)
    stats = answer.stats
    assert stats.drafted[SourceId.GRAMMAR] > 0
    assert stats.accepted[SourceId.GRAMMAR] >= 0.9 * stats.drafted[SourceId.GRAMMAR]
    assert stats.tokens / stats.steps > 2


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar.regex(r"(Yes|No), [a-z]{3,9}\."), r"(Yes|No), [a-z]{3,9}\."),
        (Grammar.of('start: "Tom" " has " NUMBER\nNUMBER: /[0-9]{1,3}/'), "Tom has [0-9]{1,3}"),
        (Grammar.of('root ::= "Tom" " has " [0-9]'), "Tom has [0-9]"),
    ],
)
@pytest.mark.parametrize("method", ["ar", "hd"])
def test_other_notations(grammar: Grammar, pattern: str, method: str) -> None:
    decoding = DecodeConfig(method, MAX_NEW_TOKENS, draft_tokens=8 if method == "hd" else None)
    answerer = Answerer(MODEL, decoding, SamplingConfig(), stores=NO_STORES)
    prompt = Prompt(({"role": "user", "content": ASKED},), grammar=grammar)
    (answer,) = answerer.all_answers([prompt])
    assert re.fullmatch(pattern, "".join(answer))


class TestTrees:
    """Random trees under a schema: what remains is allowed, what is added is forced, and parents come first."""

    @given(data=st.data(), name=st.sampled_from(FEW), most=st.integers(1, LARGEST_TREE))
    def test_every_node_is_allowed(self, data: st.DataObject, name: str, most: int, compiler: GrammarCompiler) -> None:
        grammar = Grammar.json_schema(JSON_SCHEMAS[name])
        guide, oracle = compiler.guide(grammar), compiler.guide(grammar)._matcher
        answer: list[int] = []
        for _ in range(data.draw(st.integers(0, 12))):
            allowed = (~guide.forbidden(torch.device("cpu"), compiler.vocabulary)).nonzero()[:, 0].tolist()
            token = data.draw(st.sampled_from(allowed))
            answer.append(token)
            guide.extend([token])
            if oracle.is_stopped():
                return
        assert oracle.consume_tokens(answer)
        if oracle.is_stopped():
            return
        size = data.draw(st.integers(0, most))
        likely = [
            *guide.forced(),
            *(~guide.forbidden(torch.device("cpu"), compiler.vocabulary)).nonzero()[:9, 0].tolist(),
        ]
        tokens = [data.draw(st.sampled_from([*likely, 5, 6])) for _ in range(size)]
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
        tree = DraftTree.of(0, tokens, parents, SourceId.CONTEXT)
        found = GuidedDrafter(NoDraft(), guide, most)._constrain(tree)
        assert len(found) <= most
        paths: list[list[int]] = [[]]
        for node, (token, parent) in enumerate(zip(found.tokens.tolist(), found.parents.tolist(), strict=True)):
            assert parent < node
            paths.append([*paths[parent + 1], token])
            assert oracle.validate_tokens(paths[-1]) == len(paths[-1])
        assert found.forced_tokens is not None
        for path, forced_tokens in zip(paths, found.forced_tokens.tolist(), strict=True):
            if forced_tokens != UNDETERMINED:
                after = compiler.guide(grammar)
                after.extend([*answer, *path])
                allowed = (~after.forbidden(torch.device("cpu"), compiler.vocabulary)).nonzero()[:, 0].tolist()
                assert allowed == [forced_tokens]
        kept = found.sources == SourceId.CONTEXT
        expected = [node for node in range(size) if self.is_allowed(oracle, tree, node)]
        assert found.tokens[kept].tolist() == [tokens[node] for node in expected]
        assert guide.forced() == oracle_forced(compiler, oracle), "the state is as before"

    @staticmethod
    def is_allowed(oracle: LLMatcher, tree: DraftTree, node: int) -> bool:
        path: list[int] = []
        while node >= 0:
            path.insert(0, int(tree.tokens[node]))
            node = int(tree.parents[node])
        return bool(oracle.validate_tokens(path) == len(path))

    def test_a_hierarchy_continues_from_what_is_forced(self) -> None:
        """The context follows the chain with known tokens; other trees are as without a chain."""
        prompt = [7, 11, 12, 13, 14, 15, 16, 9]
        drafter = Hierarchy()
        drafter.begin(prompt)
        before = drafter.draft(prompt)
        drafter.expect([11, 12])
        tree = drafter.draft(prompt)
        assert tree.tokens[:6].tolist() == [11, 12, 13, 14, 15, 16]
        assert tree.parents[:6].tolist() == [-1, 0, 1, 2, 3, 4]
        assert tree.sources[:3].tolist() == [SourceId.GRAMMAR, SourceId.GRAMMAR, SourceId.CONTEXT]
        after = drafter.draft(prompt)
        assert (after.tokens.tolist(), after.parents.tolist()) == (before.tokens.tolist(), before.parents.tolist())

    def test_plain_decoding_stays_plain(self, compiler: GrammarCompiler) -> None:
        drafter = NoDraft()
        assert guided_drafter(drafter, compiler.guide(Grammar.regex("a+")), 8) is drafter
        hierarchy = Hierarchy()
        assert guided_drafter(hierarchy, compiler.guide(Grammar.regex("a+")), 0) is hierarchy


def oracle_forced(compiler: GrammarCompiler, matcher: LLMatcher) -> list[int]:
    from hdtool.runtime.generation.grammar import Guide

    return Guide(matcher.deep_copy(), compiler._tokenizer).forced()


def test_generate_of_transformers(embedded: Loaded) -> None:
    generator = Generator.drafting(embedded.tokenizer, DecodeConfig(draft_tokens=8), NO_STORES)
    inputs = embedded.tokenizer("Answer: ", return_tensors="pt")
    options: Any = {"max_new_tokens": 40, "custom_generate": generator, "do_sample": False}
    output = embedded.target.model.generate(**inputs, **options, grammar=Grammar.regex("[a-z]{4} [0-9]{2}"))
    text = embedded.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert re.fullmatch("[a-z]{4} [0-9]{2}", str(text))
    recorded = embedded.target.model.generate(
        **inputs,
        **options,
        grammar=Grammar.regex("[a-z]{4} [0-9]{2}"),
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    asked = inputs["input_ids"].shape[1]
    assert recorded.sequences.tolist() == output.tolist()
    assert [int(scores.argmax()) for scores in recorded.scores] == output[0, asked:].tolist()
    assert all(bool(logits.isfinite().all()) for logits in recorded.logits)
    assert len(recorded.logits) == len(recorded.scores)
    options["custom_generate"] = Generator(tokenizer=embedded.tokenizer)
    plain = embedded.target.model.generate(**inputs, **options, grammar=Grammar.regex("[a-z]{4} [0-9]{2}"))
    assert plain.tolist() == output.tolist()
    with pytest.raises(OptionError, match=r"tokenizer=… or make it by Generator\.drafting"):
        options["custom_generate"] = Generator()
        embedded.target.model.generate(**inputs, **options, grammar=Grammar.regex("a"))


class TestWork:
    """An ambiguous grammar ends its answer before it delays others; the grammars of applications do not."""

    @pytest.mark.parametrize("grammar", LARGE_GRAMMARS.values(), ids=LARGE_GRAMMARS)
    @pytest.mark.parametrize("seed", range(4))
    def test_any_answer_can_be_followed(self, grammar: Grammar, seed: int, compiler: GrammarCompiler) -> None:
        generator, guide = torch.Generator().manual_seed(seed), compiler.guide(grammar)
        while guide.length < MAX_NEW_TOKENS and not guide._matcher.is_stopped():
            allowed = (~guide.forbidden(torch.device("cpu"), compiler.vocabulary)).nonzero()[:, 0]
            chosen = torch.randint(len(allowed), (1,), generator=generator)
            guide.extend([int(allowed[chosen])])
        assert guide.length

    @pytest.mark.parametrize(
        "rules", ['s: s s | "a" | "b" | s s s | ""', 's: s s | s s s | "" | /[a-z ]/ | /[A-Z0-9]/ | /[,.]/']
    )
    def test_an_ambiguous_grammar_ends_the_answer(
        self, rules: str, embedded: Loaded, compiler: GrammarCompiler
    ) -> None:
        guide = compiler.guide(Grammar.of(f"start: s\n{rules}"))
        token = embedded.tokenizer.encode("a", add_special_tokens=False)[-1]
        with pytest.raises(PromptError, match=r"cannot be followed further .* make it simpler"):
            for _ in range(100):
                guide.bits()
                guide.extend([token])

    def test_a_draft_beyond_the_limits_does_not_end_the_answer(
        self, embedded: Loaded, compiler: GrammarCompiler
    ) -> None:
        guide = compiler.guide(Grammar.of('start: s\ns: s s | "a" | "b" | s s s | ""'))
        token = embedded.tokenizer.encode("a", add_special_tokens=False)[-1]
        guide.extend([token] * 60)
        tokens = np.full(LARGEST_TREE, token)
        guided = guide.constrain_tree(tokens, np.arange(-1, LARGEST_TREE - 1))
        assert 0 < guided.allowed.sum() < LARGEST_TREE
        assert 0 < guide.allowed(tokens.tolist()) < LARGEST_TREE
        guide.extend([token])
        assert guide.bits().any()

    def test_only_the_answer_itself_reports_it(self, embedded: Loaded, compiler: GrammarCompiler) -> None:
        """An error while drafting would end all answers of a batch."""
        guide = compiler.guide(Grammar.of('start: s\ns: s s | "a" | "b" | s s s | ""'))
        token = embedded.tokenizer.encode("a", add_special_tokens=False)[-1]
        drafter, context = guided_drafter(Hierarchy(), guide), [1]
        drafter.begin(context)
        for _ in range(100):
            context.append(token)
            drafter.draft(context)
        with pytest.raises(PromptError, match=r"cannot be followed further"):
            guide.bits()


class TestFaults:
    @pytest.mark.parametrize(
        ("grammar", "fault"),
        [
            (Grammar.json_schema({"type": "strin"}), "the JSON schema cannot be used"),
            (Grammar.json_schema({"$ref": "#/nowhere"}), "the JSON schema cannot be used"),
            (Grammar.json_schema(False), "the JSON schema cannot be used"),
            (Grammar.regex("(a"), "the regular expression cannot be used"),
            (Grammar.of("start: nowhere"), "the grammar cannot be used"),
            (Grammar.of("root ::= nowhere"), "the grammar cannot be used"),
            (Grammar.of("start ="), "the grammar cannot be used"),
        ],
    )
    def test_a_grammar_that_cannot_be_used_is_one_line(
        self, grammar: Grammar, fault: str, compiler: GrammarCompiler
    ) -> None:
        with pytest.raises(PromptError, match=fault) as error:
            compiler.guide(grammar)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        ("row", "fault"),
        [
            ({"regex": "a", "grammar": "start: a"}, "regex and grammar exclude each other"),
            ({"regex": 3}, "`regex` must be a text, got int"),
            ({"json_schema": [1]}, "the JSON schema is list"),
            ({"json_schema": "{"}, "not valid JSON"),
            ({"response_format": {"type": "json_schema"}}, "`response_format` must be"),
            ({"response_format": "json"}, "`response_format` must be"),
            ({"grammar": " "}, "the grammar is empty"),
            ({"regex": "a" * (1 << 20) + "a"}, "are the most"),
        ],
    )
    def test_a_row_that_is_no_grammar(self, row: dict[str, Any], fault: str) -> None:
        with pytest.raises(PromptError, match=re.escape(fault)):
            grammar_of(row, "prompts.jsonl:3")

    def test_forms_of_openai(self) -> None:
        schema = {"type": "object", "properties": {}}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        assert grammar_of({"response_format": form}, "") == Grammar.json_schema(schema)
        assert grammar_of({"response_format": {"type": "json_object"}}, "") == Grammar.json_schema({"type": "object"})
        assert grammar_of({"response_format": {"type": "text"}}, "") is None


class TestCommand:
    QUICK = ("--max-new-tokens", "60", "--draft-tokens", "8", "--history", "none", "--model-db", "none")

    def test_a_schema_for_all_and_one_for_a_line(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "schema.json").write_text(json.dumps(JSON_SCHEMAS["yes or no"]))
        rows = [{"prompt": "Is 3 odd?"}, {"prompt": "Is 4 odd?", "regex": "(Yes|No)\\."}]
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
        schema = str(tmp_path / "schema.json")
        assert run(["generate", "--prompts", str(prompts), "--json-schema", schema, *self.QUICK, "--json"]) == 0
        first, second = map(json.loads, capfd.readouterr().out.splitlines())
        assert first["text"].startswith('{"answer": ') and "grammar" in first["sources"]
        assert second["text"] in ("Yes.", "No.")

    @pytest.mark.parametrize(
        ("options", "code", "fault"),
        [
            (["--regex", "a", "--json-schema", "x.json"], 2, "--json-schema and --regex exclude each other"),
            (["--json-schema", "missing.json"], 1, "missing.json does not exist"),
            (["--json-schema", "bad.json"], 1, "bad.json: the JSON schema is not valid JSON"),
            (["--grammar", "binary"], 1, "binary is binary data: give it as UTF-8 text"),
            (["--regex", "("], 1, "the regular expression cannot be used"),
            (["--tools", "bad.json"], 1, "bad.json is not a JSON file"),
            (["--tools", "empty.json"], 1, "empty.json holds no tools"),
            (["--tools", "tools.json"], 1, "chat template does not present tools"),
            (["--tools", "tools.json", "--raw"], 1, "tools need a chat template"),
        ],
    )
    def test_faults_are_one_line(
        self,
        options: list[str],
        code: int,
        fault: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("bad.json").write_text("{")
        Path("binary").write_bytes(b"\xff\xfe\x00a\xff")
        Path("empty.json").write_text("[]")
        Path("tools.json").write_text('[{"type": "function", "function": {"name": "f", "parameters": {}}}]')
        assert run(["generate", "Hello", *self.QUICK, *options]) == code
        errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and fault in errors[0]
