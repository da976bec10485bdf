"""Grammars in ``verify``, ``bench`` and ``collect``: all of them hold answers to what ``generate`` holds them to."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hdtool.builders.evaluation.bench import questions_hash
from hdtool.builders.evaluation.bench_plan import ContenderFactory
from hdtool.builders.evaluation.verify import Difference, Oracle, Verifier
from hdtool.cli.app import run
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import Grammar, Prompt
from hdtool.runtime.answering.answer_plan import compiler_for
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Bergen", "Porto"]}, "people": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["town", "people"],
    "additionalProperties": False,
}
VALID = re.compile(r'\{"town": "(Bergen|Porto)", "people": [0-9]\}')
REGEX = "(yes|no), (sir|madam)"
ROWS: list[dict[str, Any]] = [
    {"id": "json", "prompt": "Name a town.", "json_schema": SCHEMA},
    {"id": "regex", "prompt": "Shall we go?", "regex": REGEX},
    {"id": "free", "prompt": "Tell me about spring."},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize("drawn", [[], ["--temperature", "0.9", "--seed", "3"]], ids=["greedy", "sampled"])
def test_verify_compares_answers_under_the_grammar(
    drawn: list[str], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["verify", "--prompts", str(prompts), "--max-new-tokens", "40", "--draft-tokens", "12", *drawn]
    assert run([*command, "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lossless"] and set(found["identical"].values()) == {3}
    assert run([*command, "--quiet", "--json", "--regex", "[0-9]{4}"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["tokens"] < found["tokens"], "the option holds the prompt that has no grammar of its own"


def test_verify_finds_a_choice_that_the_grammar_forbids(embedded: Loaded) -> None:
    """At a difference, scores are those under the mask, whatever the answer was until there."""
    asked = Prompt.from_text("Shall we go?")
    ids = encode_conversation(embedded.tokenizer, asked.messages, chat=None)
    grammar = Grammar.regex(REGEX)
    verifier = Verifier(embedded, SamplingConfig(), NoDraft(), 20)
    contender = ContenderFactory(
        embedded, StoreSet(databases="C"), ModelConfig(), DecodeConfig(max_new_tokens=20), SamplingConfig()
    ).contenders(["ar"])["ar"]
    answer = contender.answer(ids, compiler_for(embedded).guide(grammar)).output_ids
    free = contender.answer(ids).output_ids
    assert answer[0] != free[0], "a free answer must begin otherwise for this test to show anything"
    first = Difference("it", Oracle.PLAIN, ids, [], answer[0], free[0], grammar=grammar)
    later = Difference("it", Oracle.PLAIN, ids, answer[:2], answer[2], free[0], grammar=grammar)
    for explanation in verifier.explain([first, later]):
        assert explanation.chosen == explanation.difference.expected
        assert not explanation.near_tie
        assert explanation.precise and explanation.precise.found == float("-inf")


def test_every_contender_follows_the_grammar(embedded: Loaded) -> None:
    ids = encode_conversation(embedded.tokenizer, Prompt.from_text("Name a town.").messages, chat=None)
    decoding = DecodeConfig(max_new_tokens=40, draft_tokens=12)
    lineup = ContenderFactory(embedded, StoreSet(databases="C"), ModelConfig(), decoding, SamplingConfig())
    grammar = Grammar.json_schema(SCHEMA)
    found = {
        name: contender.answer(ids, compiler_for(embedded).guide(grammar))
        for name, contender in lineup.contenders(["generate", "ar", "pld", "hd", "logitspec", "suffix"]).items()
    }
    assert VALID.fullmatch(found["ar"].text)
    assert {tuple(one.output_ids) for one in found.values()} == {tuple(found["ar"].output_ids)}
    assert len(found["hd"].step_tokens) < len(found["ar"].step_tokens), "what the grammar forces is drafted"
    assert max(len(answer.step_tokens) for name, answer in found.items()) == len(found["generate"].output_ids)


def test_bench_leaves_out_peers_without_the_grammar(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bench"
    command = ["bench", "--questions", str(prompts), "--out", str(out), "--quiet", "--max-new-tokens", "12"]
    assert run([*command, "--methods", "ar,generate-pld"]) == 2
    assert "generate-pld cannot be measured on answers that follow a grammar" in capsys.readouterr().err
    assert run([*command, "--methods", "ar,hd", "--peers", "--warm-up", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tasks"]["overall"].keys() == {"generate", "ar", "hd"}


def test_grammars_and_tools_tell_questions_apart() -> None:
    free = Prompt.from_text("Name a town.", id="1")
    held = [
        Prompt(free.messages, id="1", grammar=Grammar.json_schema(SCHEMA)),
        Prompt(free.messages, id="1", grammar=Grammar.regex(REGEX)),
        Prompt(free.messages, id="1", tools=({"type": "function", "function": {"name": "f"}},)),
    ]
    assert len({questions_hash([one]) for one in (free, *held)}) == 4


def test_collect_records_the_grammar_and_resumes_under_it_alone(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.jsonl"
    command = ["collect", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "40", "--quiet"]
    assert run(command) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert (rows[0]["json_schema"], rows[1]["regex"]) == (SCHEMA, REGEX)
    assert not {"json_schema", "regex", "grammar"} & rows[2].keys()
    assert VALID.fullmatch(rows[0]["messages"][-1]["content"])
    assert re.fullmatch(REGEX, rows[1]["messages"][-1]["content"])
    whole = out.read_bytes()
    out.write_bytes(whole[: len(whole) // 2])
    assert run(command) == 0
    assert out.read_bytes() == whole
    assert run([*command, "--regex", "[a-z]+"]) == 1
    assert "answers.jsonl:3 was answered under another grammar: choose another --out" in capsys.readouterr().err
    assert out.read_bytes() == whole
    assert run(["generate", "--prompts", str(out), "--max-new-tokens", "40", "--json"]) == 0, "it is a file of prompts"


def test_a_grammar_of_an_option_holds_all_answers(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("One?\nTwo?\n")
    assert run(["collect", "--prompts", str(prompts), "--out", str(out), "--regex", "[0-9]{3}", "--quiet"]) == 0
    for line in out.read_text().splitlines():
        assert re.fullmatch("[0-9]{3}", json.loads(line)["messages"][-1]["content"])
