"""Recorded conversations: every format, every way to get it wrong, and the turns that they become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader
from hdtool.cli.app import run
from hdtool.data.errors import HdtoolError, OptionError, RecordError
from hdtool.data.texts_and_traces import RecordedAnswer, Trace, read_traces
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load, load_stops, load_tokenizer

SYSTEM = {"role": "system", "content": "Be brief."}
USER, AGAIN = ({"role": "user", "content": text} for text in ("What is a list?", "And a tuple?"))
SAID, SAID_AGAIN = ({"role": "assistant", "content": text} for text in ("A sequence.", "One that stays."))
CHAT = {"id": 7, "category": "code", "messages": [USER, SAID, AGAIN, SAID_AGAIN]}
QUESTION = {"question_id": 81, "category": "writing", "turns": ["What is a list?", "And a tuple?"]}
ANSWERS = {"question_id": 81, "model_id": "m", "choices": [{"index": 0, "turns": ["A sequence.", "One that stays."]}]}


def written(folder: Path, *rows: Any, name: str = "traces.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def refusal(path: Path, questions: Path | None = None, kind: type[HdtoolError] = RecordError) -> str:
    with pytest.raises(kind) as caught:
        read_traces([path], questions)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Readers --------------------------------------------------------------------------------------


def test_a_chat(tmp_path: Path) -> None:
    (trace,) = read_traces([path := written(tmp_path, CHAT)])
    assert trace == Trace(
        "7", "code", (USER, SAID, AGAIN, SAID_AGAIN), (RecordedAnswer(1), RecordedAnswer(3)), f"{path}:1"
    )


@pytest.mark.parametrize(
    ("messages", "places"),
    [
        ([SYSTEM, USER, SAID, AGAIN], [2]),
        ([SAID, USER, SAID], [2]),
        ([USER, SAID, SAID_AGAIN], [1]),
        ([USER], []),
    ],
)
def test_what_the_assistant_says_after_somebody_is_an_answer(
    tmp_path: Path, messages: list[dict[str, str]], places: list[int]
) -> None:
    traces = read_traces([written(tmp_path, CHAT, {"messages": messages})])
    assert [answer.message_index for answer in traces[1].answers] == places
    assert (traces[1].id, traces[1].category) == ("2", "")


def test_answer_files_are_joined_with_their_questions(tmp_path: Path) -> None:
    questions = written(tmp_path, {**QUESTION, "question_id": 80}, QUESTION, name="question.jsonl")
    path = written(tmp_path, ANSWERS)
    (trace,) = read_traces([path], questions)
    assert trace == Trace(
        "81", "writing", (USER, SAID, AGAIN, SAID_AGAIN), (RecordedAnswer(1), RecordedAnswer(3)), f"{path}:1"
    )
    shorter = written(tmp_path, {**ANSWERS, "choices": [{"turns": ["A sequence."]}]})
    assert read_traces([shorter], questions)[0].messages == (USER, SAID)


def collected(answers: list[dict[str, Any]], messages: list[dict[str, str]], **more: Any) -> dict[str, Any]:
    return {"id": "x", "category": "", "max_new_tokens": 9, "messages": messages, "answers": answers, **more}


def test_collected_answers_say_how_they_ended(tmp_path: Path) -> None:
    rows = [
        collected([{"output_ids": [5, 6, 1], "finish": "stop"}], [USER, SAID]),
        collected([{"output_ids": [5, 6], "finish": "length"}], [USER, SAID, AGAIN, SAID_AGAIN]),
        collected([{"output_ids": [5], "finish": "context"}] * 2, [USER, SAID, AGAIN, SAID_AGAIN]),
    ]
    traces = read_traces([written(tmp_path, *rows)])
    assert [trace.answers for trace in traces] == [
        (RecordedAnswer(1, (5, 6, 1), 9),),
        (RecordedAnswer(3, (5, 6), 2),),  # the first answer was a part of the prompt
        (RecordedAnswer(1, (5,), 1), RecordedAnswer(3, (5,), 1)),
    ]


def test_several_files_make_one_list(tmp_path: Path) -> None:
    paths = [written(tmp_path, CHAT), written(tmp_path, CHAT, {**CHAT, "id": 8}, name="more.jsonl")]
    assert [trace.id for trace in read_traces(paths)] == ["7", "7", "8"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({**ANSWERS, "question_id": 82}, ":1 (it answers question 82, which the file of questions lacks"),
        ({**ANSWERS, "choices": []}, ":1 (`choices` must begin with an object that has `turns`, a list of texts"),
        ({**ANSWERS, "choices": [{"turns": [None]}]}, ":1 (`choices` must begin with"),
        ({**ANSWERS, "choices": [{"turns": ["a", "b", "c"]}]}, ":1 (3 answers to a question of 2 turns"),
    ],
)
def test_answer_files_that_do_not_fit(tmp_path: Path, row: Any, said: str) -> None:
    questions = written(tmp_path, QUESTION, name="question.jsonl")
    assert said in refusal(written(tmp_path, row), questions)


def test_files_without_answers(tmp_path: Path) -> None:
    assert "is empty" in refusal(written(tmp_path))
    assert "no answers of a model are in" in refusal(written(tmp_path, {"messages": [USER]}))
    assert "does not exist" in refusal(tmp_path / "none.jsonl")
    assert "is a folder" in refusal(tmp_path)
    said = refusal(path := written(tmp_path, CHAT, ANSWERS))
    assert f"{path}:2 (answers without their questions, as Spec-Bench writes them: name the questions with" in said
    questions = written(tmp_path, QUESTION, name="question.jsonl")
    assert "no trace is one" in refusal(written(tmp_path, CHAT), questions, OptionError)


# Turns ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig())


def turns_of(tokenizer: Any, trace: Trace, chat: bool | None = None) -> list[RecordedTurn]:
    return TurnReader(tokenizer, load_stops(ModelConfig(), tokenizer), tokenizer.eos_token_id, chat).turns(trace)


def templated(tokenizer: Any, messages: list[dict[str, str]], prompt: bool) -> Any:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]


def test_the_stops_are_those_of_the_loaded_model(tokenizer: Any, tmp_path: Path) -> None:
    assert load_stops(ModelConfig(), tokenizer) == load(ModelConfig()).stops
    tokenizer.save_pretrained(tmp_path)
    assert load_stops(ModelConfig(str(tmp_path)), tokenizer) == {tokenizer.eos_token_id}


def test_contexts_are_rebuilt_through_the_template(tokenizer: Any, tmp_path: Path) -> None:
    (trace,) = read_traces([written(tmp_path, CHAT)])
    first, second = turns_of(tokenizer, trace)
    messages = CHAT["messages"]
    assert isinstance(messages, list)
    assert first.prompt == templated(tokenizer, messages[:1], True)
    assert second.prompt == templated(tokenizer, messages[:3], True)
    assert tokenizer.decode(second.answer[:-1]) == "One that stays."
    assert second.answer[-1] in load_stops(ModelConfig(), tokenizer)
    whole = templated(tokenizer, messages, False)
    assert (second.prompt + second.answer) == whole[: len(second.prompt + second.answer)]
    assert (first.conversation, first.category, first.number, second.number) == ("7", "code", 0, 1)
    assert first.max_tokens is None


def test_raw_texts_follow_one_another(tokenizer: Any, tmp_path: Path) -> None:
    (trace,) = read_traces([written(tmp_path, CHAT)])
    first, second = turns_of(tokenizer, trace, chat=False)
    assert first.prompt == tokenizer("What is a list?")["input_ids"]
    assert second.prompt == tokenizer("What is a list?\nA sequence.\nAnd a tuple?\n")["input_ids"]
    assert tokenizer.decode(second.answer[:-1]) == "One that stays."


def with_template(tokenizer: Any, template: str) -> Any:
    changed = load_tokenizer(ModelConfig())
    changed.chat_template = template
    return changed


ROLES = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        ROLES + "{% if add_generation_prompt %}[assistant]{% endif %}",
        ROLES + "{% if add_generation_prompt %}[assistant]<think>{% endif %}",
        "{{ 'a' if add_generation_prompt else 'b' }}" + ROLES,
    ],
    ids=["marks no end", "tells answers otherwise", "has another start"],
)
def test_templates_of_other_manners(tokenizer: Any, tmp_path: Path, template: str) -> None:
    (trace,) = read_traces([written(tmp_path, CHAT)])
    changed = with_template(tokenizer, template)
    for turn, said in zip(turns_of(changed, trace), ("A sequence.", "One that stays."), strict=True):
        assert tokenizer.decode(turn.answer[:-1]) == said
        assert turn.answer[-1] == tokenizer.eos_token_id


def test_recorded_ids_are_taken_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    ids = tokenizer("A sequence.", add_special_tokens=False)["input_ids"]
    row = collected([{"output_ids": ids, "finish": "length"}], [USER, SAID])
    (trace,) = read_traces([written(tmp_path, row)])
    (turn,) = turns_of(tokenizer, trace)
    assert (turn.answer, turn.max_tokens) == (ids, len(ids))


@pytest.mark.parametrize("ids", [[5, 6], [10**6]])
def test_ids_of_another_tokenizer(tokenizer: Any, tmp_path: Path, ids: list[int]) -> None:
    (trace,) = read_traces([written(tmp_path, collected([{"output_ids": ids, "finish": "length"}], [USER, SAID]))])
    with pytest.raises(RecordError, match=r"traces.jsonl:1: the ids of an answer do not spell its text"):
        turns_of(tokenizer, trace)


@pytest.mark.parametrize(
    ("template", "chat", "messages", "said"),
    [
        (None, True, [USER, SAID], "no chat template: leave out --chat"),
        ("{{ raise_exception('no system prompts') }}", None, [SYSTEM, USER, SAID], "no system prompts"),
        ("{{ '' }}", None, [USER, SAID], "there is nothing before the answer"),
    ],
)
def test_conversations_that_cannot_be_rebuilt(
    tokenizer: Any, tmp_path: Path, template: str, chat: bool | None, messages: list[dict[str, str]], said: str
) -> None:
    changed = with_template(tokenizer, template)
    (trace,) = read_traces([written(tmp_path, {"messages": messages})])
    with pytest.raises(RecordError, match=r"traces.jsonl:1: ") as caught:
        turns_of(changed, trace, chat)
    assert said in str(caught.value)


def test_a_tokenizer_that_knows_no_end(tokenizer: Any, tmp_path: Path) -> None:
    (trace,) = read_traces([written(tmp_path, CHAT)])
    with pytest.raises(RecordError, match="knows no token that ends an answer"):
        TurnReader(tokenizer, (), None).turns(trace)


def test_what_collect_writes_is_read(tokenizer: Any, tmp_path: Path) -> None:
    prompts = written(tmp_path, {"turns": ["One?", "Two?"], "id": "t"}, {"prompt": "Three?"}, name="prompts.jsonl")
    out = tmp_path / "out.jsonl"
    assert run(["collect", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", "6", "--quiet"]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    turns = [turn for trace in read_traces([out]) for turn in turns_of(tokenizer, trace)]
    assert [turn.answer for turn in turns] == [answer["output_ids"] for row in rows for answer in row["answers"]]
    assert [(turn.conversation, turn.number) for turn in turns] == [("t", 0), ("t", 1), ("2", 0)]
