"""Stop strings: where answers end, what is shown of them, and that drafting changes neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from hdtool.cli.app import run
from hdtool.data.prompts import Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.generation.stop_strings import before_stop, cut_at_stop
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig

TEXTS = st.text("ab\n", max_size=12)
QUESTIONS = ("def read(path):", "What is a list in Python?", "import os")


@given(pieces=st.lists(TEXTS, max_size=8), stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@example(pieces=["aab"], stops=["ab"])
@example(pieces=["ab", "a"], stops=["aba", "b"])
@example(pieces=["ab", "b"], stops=["aba", "b"])
@example(pieces=["a", "", "a", "b", "b"], stops=["aab", "ab"])
def test_what_is_shown_ends_before_the_first_stop_string(pieces: list[str], stops: list[str]) -> None:
    read: list[str] = []

    def source(number: int) -> SourceId:
        read.append(pieces[number])
        return SourceId(number % 3)

    shown = list(before_stop(((piece, source(number)) for number, piece in enumerate(pieces)), stops))
    whole = "".join(pieces)
    places = [whole.find(stop) for stop in stops if stop in whole]
    expected = whole[: min(places)] if places else whole
    assert "".join(text for text, _ in shown) == cut_at_stop(whole, stops) == expected
    assert read == pieces, "the steps behind the text are counted to their end"
    of_characters = [SourceId(number % 3) for number, piece in enumerate(pieces) for _ in piece]
    assert [found for text, found in shown for _ in text] == of_characters[: len(expected)]


@pytest.mark.usefixtures("known_cost")
@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("method", ["ar", "hd"])
def test_an_answer_is_the_plain_one_up_to_its_stop_string(
    method: str, batch_size: int, tmp_path: Path, capfd: Any
) -> None:
    plain = Answerer(ModelConfig(), DecodeConfig(method="ar", max_new_tokens=40), SamplingConfig())
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS))
    options = ["--prompts", str(prompts), "--max-new-tokens", "40", "--json", "--method", method]
    assert run(["generate", *options, "--batch-size", str(batch_size), "--stop", "self", "--stop", "\n"]) == 0
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    for record in records:
        (answer,) = plain.all_answers([Prompt.from_text(record["prompt"])])
        whole = "".join(answer)
        assert record["text"] == cut_at_stop(whole, ["self", "\n"]) != whole
        assert record["finish"] == "stop"
        assert answer.output_ids[: record["tokens"]] == record["output_ids"]
        # It ends with the very token that completes the stop string.
        before = plain.loaded.tokenizer.decode(record["output_ids"][:-1])
        assert "self" not in before and "\n" not in before


def test_a_stop_string_in_the_prompt_or_missing_from_the_answer_changes_nothing(capfd: Any) -> None:
    asked = ["generate", "def read(path):", "--max-new-tokens", "12", "--json"]
    assert run(asked) == 0
    assert run([*asked, "--stop", "def read(path):\n\n\n\n"]) == 0
    plain, stopped = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert (stopped["text"], stopped["output_ids"], stopped["finish"]) == (plain["text"], plain["output_ids"], "length")
