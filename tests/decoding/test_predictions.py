"""Predicted outputs: they save steps where they are right, and never change an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.cli.app import run as hdtool
from hdtool.data import demo
from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import OptionError
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.data.texts_and_traces import RecordedAnswer, Trace
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import decode_batch
from hdtool.runtime.core.step import Stats, Step
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, output_tokens, run
from tests.support.families import FAMILIES, VOCABULARY, model_of
from tests.support.oracle import generated, prompt_of
from tests.support.samplers import sampler_of

pytestmark = pytest.mark.usefixtures("home")

MAX_NEW_TOKENS = 40
PROMPT = prompt_of(20)


def predictions(truth: list[int], seed: int = 0) -> dict[str, list[int]]:
    """What may be predicted where the answer is ``truth``."""
    chance = random.Random(seed)
    wrong = list(truth)
    for place in range(6, len(wrong), 7):
        wrong[place] = chance.randrange(VOCABULARY)
    return {
        "true": truth,
        "too long": truth * 3,
        "partly wrong": wrong,
        "cut": [*truth[:5], *truth[15:]],
        "foreign": [chance.randrange(VOCABULARY) for _ in truth],
        "outside the vocabulary": [VOCABULARY + 5, -1, 2**31 - 1, *truth[:3], VOCABULARY, *truth],
        "one token": truth[:1],
    }


def new_drafter(most: int = 9) -> Hierarchy:
    return Hierarchy(context=False, budget=FixedBudget(most))


def of_prediction(steps: list[Step]) -> Stats:
    stats = Stats()
    for step in steps:
        stats.add(step)
    return stats


# Lossless --------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_prediction_changes_the_output(family: str, sampling: SamplingConfig) -> None:
    target = Target(model_of(family))
    plain = answer_of(target, PROMPT, sampling, MAX_NEW_TOKENS)
    drafter = Hierarchy(budget=FixedBudget(9))  # one for all, as in a program
    for name, prediction in predictions(plain).items():
        assert answer_of(target, PROMPT, sampling, MAX_NEW_TOKENS, drafter=drafter, prediction=prediction) == plain, (
            name
        )


@pytest.mark.parametrize("sampling", [SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_each_answer_of_a_batch_has_its_own_prediction(family: str, sampling: SamplingConfig) -> None:
    target = Target(model_of(family))
    prompts = [prompt_of(length) for length in (20, 7, 33, 50, 12, 9, 61)]
    plain = [answer_of(target, prompt, sampling, MAX_NEW_TOKENS) for prompt in prompts]

    def requests() -> Iterator[Request[int]]:
        for number, prompt in enumerate(prompts):
            prediction = list(predictions(plain[number]).values())[number]
            yield Request(number, prompt, sampler_of(sampling, prompt), new_drafter(), prediction=prediction)

    asked = requests()
    found: dict[int, list[Step]] = {}
    for request, step in decode_batch(target, lambda: next(asked, None), 3, max_new_tokens=MAX_NEW_TOKENS):
        found.setdefault(request.key, []).append(step)
    assert [output_tokens(found[number]) for number in range(len(prompts))] == plain
    assert of_prediction(found[0]).accepted_prediction_tokens > MAX_NEW_TOKENS // 2


# What they bring -------------------------------------------------------------------------------


def test_a_true_prediction_is_accepted_and_a_foreign_one_is_not() -> None:
    target = Target(model_of("llama"))
    plain = answer_of(target, PROMPT, SamplingConfig(), MAX_NEW_TOKENS)
    steps = {
        name: run(target, PROMPT, SamplingConfig(), MAX_NEW_TOKENS, drafter=new_drafter(), prediction=prediction)
        for name, prediction in predictions(plain).items()
    }
    assert len(steps["true"]) <= MAX_NEW_TOKENS // 6
    assert len(steps["true"]) < len(steps["partly wrong"]) < MAX_NEW_TOKENS
    assert len(steps["cut"]) < MAX_NEW_TOKENS // 2
    stats = of_prediction(steps["true"])
    assert stats.accepted_prediction_tokens == MAX_NEW_TOKENS - len(steps["true"])
    assert stats.rejected_prediction_tokens == stats.drafted.sum() - stats.accepted.sum()
    assert set(stats.sources_json()) == {"prediction"}
    assert of_prediction(steps["partly wrong"]).rejected_prediction_tokens > 0
    assert of_prediction(steps["foreign"]).accepted_prediction_tokens == 0


def test_a_prediction_is_of_one_answer() -> None:
    target = Target(model_of("llama"))
    drafter = new_drafter()
    plain = answer_of(target, PROMPT, SamplingConfig(), MAX_NEW_TOKENS)
    assert (
        len(run(target, PROMPT, SamplingConfig(), MAX_NEW_TOKENS, drafter=drafter, prediction=plain))
        < MAX_NEW_TOKENS // 2
    )
    assert len(run(target, PROMPT, SamplingConfig(), MAX_NEW_TOKENS, drafter=drafter)) == MAX_NEW_TOKENS


# In generate of transformers -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [list, torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: [ids], tuple])
def test_generate_takes_a_prediction(shape: Any) -> None:
    model: Any = model_of("llama")
    expected = generated(model, PROMPT, MAX_NEW_TOKENS)
    drafting = Generator(new_drafter())
    assert generated(model, PROMPT, MAX_NEW_TOKENS, custom_generate=drafting, prediction=shape(expected)) == expected
    assert drafting.stats.accepted_prediction_tokens > MAX_NEW_TOKENS // 2
    assert generated(model, PROMPT, MAX_NEW_TOKENS, custom_generate=drafting) == expected
    assert drafting.stats.accepted_prediction_tokens == drafting.stats.rejected_prediction_tokens == 0


@pytest.mark.parametrize("prediction", ["text", [1.5], [True], [[1], [2]], 7, torch.zeros(2, 3, dtype=torch.long)])
def test_generate_takes_token_ids_only(prediction: Any) -> None:
    with pytest.raises(OptionError, match="must be token ids of one answer"):
        generated(
            model_of("llama"), PROMPT, MAX_NEW_TOKENS, custom_generate=Generator(new_drafter()), prediction=prediction
        )


def test_a_generator_that_cannot_use_a_prediction_refuses_it() -> None:
    with pytest.raises(OptionError, match="drafter does not use one"):
        generated(model_of("llama"), PROMPT, MAX_NEW_TOKENS, custom_generate=Generator(), prediction=[1])


# Encoding --------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": "a b"}]


def spaced(scheme: str, template: str) -> PreTrainedTokenizerBase:
    """As Llama has it: spaces are marks at the start of words, and the text begins with one."""
    letters = {letter: index for index, letter in enumerate("▁abcAU:[]/\n<>s")}
    core = Tokenizer(models.BPE({**letters, "▁a": 20, "▁b": 21, "ab": 22}, [("▁", "a"), ("▁", "b"), ("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<s>")
    tokenizer.chat_template = template
    return tokenizer


def template_of(before_answer: str, ask: str = "A:") -> str:
    return (
        "{% for message in messages %}{% if message.role == 'user' %}U: {{ message.content }} {% else %}"
        + f"A:{before_answer}"
        + "{{ message.content | trim }}<s>{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + f"{ask}"
        + "{% endif %}"
    )


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
@pytest.mark.parametrize("before", ["", " ", "\n"])
def test_an_answer_begins_as_one_that_is_generated(scheme: str, before: str) -> None:
    """A space mark is there where the template has a space, and not where only the tokenizer would add one."""
    tokenizer = spaced(scheme, template_of(before))
    pieces = tokenizer.convert_ids_to_tokens(encode_answer(tokenizer, ASKED, "a b"))
    assert "".join(pieces) == {"": "a▁b", " ": "▁a▁b", "\n": "\na▁b"}[before]


def test_an_answer_after_a_raw_prompt_continues_its_text() -> None:
    tokenizer = spaced("first", "")
    for text, expected in ((" b", "▁b"), ("b", "b")):
        pieces = tokenizer.convert_ids_to_tokens(
            encode_answer(tokenizer, [{"role": "user", "content": "a"}], text, chat=False)
        )
        # "a" and "b" join to one token, so the text is encoded as if it began a line.
        assert "".join(pieces) == expected


def test_a_template_that_refuses_or_changes_answers_does_no_harm() -> None:
    for template in ("U:{{ messages[0].content }}A:", "{{ raise_exception('no') if messages | length > 1 }}U:A:"):
        tokenizer = spaced("first", template)
        assert "".join(tokenizer.convert_ids_to_tokens(encode_answer(tokenizer, ASKED, "a b"))) == "a▁b"


def test_a_prediction_is_encoded_as_a_recorded_answer() -> None:
    config = ModelConfig()
    reader = TurnReader.of_model(config)
    tokenizer = load_tokenizer(config)
    for text in ("One, two.", "def read(path):\n    return 1", "Grüße 世界"):
        trace = Trace("1", "", (*ASKED, {"role": "assistant", "content": text}), (RecordedAnswer(1),), "here")
        (turn,) = reader.turns(trace)
        assert turn.prompt == encode_conversation(tokenizer, ASKED)
        assert [*encode_answer(tokenizer, ASKED, text), turn.answer[-1]] == turn.answer


# The command -----------------------------------------------------------------------------------

QUESTION = "Explain `zip` and `map`."
SETTINGS = ["--max-new-tokens", "48", "--draft-tokens", "16", "--model-db", "none", "--corpus-db", "none", "--json"]


def answers(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert hdtool(["generate", *SETTINGS, *arguments]) == 0
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_generate_drafts_from_a_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (plain,) = answers(capfd, "--prompt", QUESTION)
    assert (plain["accepted_prediction_tokens"], plain["rejected_prediction_tokens"]) == (0, 0)
    file = tmp_path / "before.py"
    file.write_text(plain["text"] + "\n")
    for sources in ([], ["--sources", "corpus"], ["--method", "hd+logitspec"]):
        (drafted,) = answers(capfd, "--prompt", QUESTION, "--prediction", str(file), *sources)
        assert drafted["output_ids"] == plain["output_ids"]
        assert drafted["steps"] < plain["steps"]
        counts = drafted["sources"]["prediction"]
        assert drafted["accepted_prediction_tokens"] == counts["accepted"] > 10
        assert drafted["rejected_prediction_tokens"] == counts["drafted"] - counts["accepted"]
    assert hdtool(["generate", *SETTINGS[:-1], "--stats", "--prompt", QUESTION, "--prediction", str(file)]) == 0
    assert f"{counts['accepted']:,}" and " rejected, in " in capfd.readouterr().err


@pytest.mark.parametrize("batch", [[], ["--batch-size", "2"]])
def test_a_line_has_its_own_prediction(batch: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    questions = [QUESTION, "What does `len` do?", "Name a colour."]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))
    plain = answers(capfd, "--prompts", str(asked))
    rows: list[dict[str, Any]] = [{"prompt": question} for question in questions]
    rows[0]["prediction"] = {"type": "content", "content": [{"type": "text", "text": plain[0]["text"]}]}
    rows[1] |= {"turns": [questions[1], "And more?"], "prediction": plain[1]["text"]}
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = tmp_path / "other.txt"
    other.write_text(plain[2]["text"])
    drafted = answers(capfd, "--prompts", str(asked), "--prediction", str(other), *batch)
    first, second, later, third = drafted
    assert [one["output_ids"] for one in (first, second, third)] == [one["output_ids"] for one in plain]
    for one in (first, second, third):
        assert one["accepted_prediction_tokens"] > 10
    assert later["accepted_prediction_tokens"] == later["rejected_prediction_tokens"] == 0


def test_collect_drafts_from_predictions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (plain,) = answers(capfd, "--prompt", QUESTION)
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    asked.write_text(json.dumps({"prompt": QUESTION, "prediction": plain["text"]}))
    assert hdtool(["collect", "--prompts", str(asked), "--out", str(out), "--max-new-tokens", "48", "--quiet"]) == 0
    (answer,) = json.loads(out.read_text())["answers"]
    assert answer["output_ids"] == plain["output_ids"]
    (prompt,) = read_prompts(asked)
    (found,) = Answerer(ModelConfig(), DecodeConfig(max_new_tokens=48, draft_tokens=16), SamplingConfig()).all_answers(
        [prompt]
    )
    assert "".join(found) and found.stats.accepted_prediction_tokens > 10


def test_methods_without_predictions_ignore_those_of_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    prompt = Prompt(({"role": "user", "content": QUESTION},), prediction="some text")
    (answer,) = Answerer(ModelConfig(), DecodeConfig("pld", 8), SamplingConfig()).all_answers([prompt])
    assert "".join(answer) and not answer.stats.drafted[SourceId.PREDICTION]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "does not exist"),
        (b"", "is empty: put the text in it"),
        (b" \n", "is empty: put the text in it"),
        (b"PK\0\3", "is binary data: a prediction is UTF-8 text"),
        (b"Gr\xfc\xdfe", "is not UTF-8 text (byte 0xfc): a prediction is UTF-8 text"),
    ],
)
def test_bad_files_are_refused_in_one_line(
    content: bytes | None, complaint: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "before"
    if content is not None:
        file.write_bytes(content)
    for place, told in ((file, complaint), (tmp_path, "is a folder")):
        assert hdtool(["generate", "--prompts", str(demo.PROMPTS), "--prediction", str(place)]) == 1
        printed = capfd.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1
        assert printed.err.startswith(f"error: {place}") and told in printed.err
