"""Prompts from files: every shape that people have, and every way to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hdtool.data import demo
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt, read_prompts

USER = {"role": "user", "content": "hi"}


def read(folder: Path, content: str | bytes, name: str = "prompts.jsonl") -> list[Prompt]:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_prompts(path)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "hi"}, Prompt(({"role": "user", "content": "hi"},), id="1")),
        ({"question": "hi", "answer": "no"}, Prompt((USER,), id="1")),
        ({"question_id": 81, "category": "math", "turns": ["hi", "and?"]}, Prompt((USER,), ("and?",), "81", "math")),
        ({"id": "a", "messages": [USER]}, Prompt((USER,), id="a")),
        ({"messages": [USER, {"role": "assistant", "content": "old answer"}]}, Prompt((USER,), id="1")),
        ("hi", Prompt((USER,), id="1")),
        ({"prompt": "hi", "prediction": "yes"}, Prompt((USER,), id="1", prediction="yes")),
        ({"prompt": "hi", "prediction": None}, Prompt((USER,), id="1")),
        (
            {"messages": [USER], "prediction": {"type": "content", "content": "yes"}},
            Prompt((USER,), id="1", prediction="yes"),
        ),
        (
            {
                "turns": ["hi", "and?"],
                "prediction": {"type": "content", "content": [{"type": "text", "text": part} for part in ("y", "es")]},
            },
            Prompt((USER,), ("and?",), "1", prediction="yes"),
        ),
    ],
)
def test_every_known_shape(tmp_path: Path, row: object, expected: Prompt) -> None:
    assert read(tmp_path, json.dumps(row)) == [expected]
    assert read(tmp_path, json.dumps([row]), "prompts.json") == [expected]


def test_text_files_hold_a_prompt_a_line(tmp_path: Path) -> None:
    prompts = read(tmp_path, "\ufeffone\r\n\n  \ntwo {not json\n", "prompts.txt")
    assert [(prompt.id, prompt.messages[0]["content"]) for prompt in prompts] == [("1", "one"), ("4", "two {not json")]
    assert len(read(tmp_path, "plain\n", "prompts")) == 1
    assert read(tmp_path, '{"prompt": "hi"}', "prompts")[0].messages == (USER,)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', r"prompts.jsonl:2: not valid JSON"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "answers only"),
        ('{"prompt": "a", "prediction": 3}', "`prediction` must be a text or"),
        ('{"prompt": "a", "prediction": {"type": "text", "content": "b"}}', "`prediction` must be a text or"),
        ('{"prompt": "a", "prediction": {"type": "content"}}', "`prediction` must be a text or"),
        ('{"prompt": "a", "prediction": {"type": "content", "content": ["b"]}}', "`prediction` must be a text or"),
        ('{"prompt": "a", "prediction": ["b"]}', "`prediction` must be a text or"),
        ('{"prompt": "a", "prediction": " "}', "`prediction` is empty"),
        ('{"prompt": "a", "prediction": {"type": "content", "content": []}}', "`prediction` is empty"),
        ('{"prompt": "a", "prediction": "\\ud800"}', "`prediction` is not valid Unicode"),
    ],
)
def test_bad_files_are_named_in_one_line(tmp_path: Path, content: str | bytes, complaint: str) -> None:
    with pytest.raises(PromptError, match=complaint) as error:
        read(tmp_path, content)
    assert "\n" not in str(error.value)
    assert "prompts.jsonl" in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="does not exist"):
        read_prompts(tmp_path / "none.txt")
    with pytest.raises(PromptError, match="is a folder"):
        read_prompts(tmp_path)


def test_the_embedded_prompts_are_several_kinds_in_turn() -> None:
    prompts = read_prompts(demo.PROMPTS)
    assert len(prompts) == 200
    assert len({prompt.id for prompt in prompts}) == 200
    assert {prompt.category for prompt in prompts[:4]} == {"math", "explain", "write", "edit"}


@pytest.mark.parametrize("kind", ["image_url", "input_image", "image", "input_audio", "file"])
def test_prompts_with_images_or_sounds_are_refused(tmp_path: Path, kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "a"}}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}) + "\n")
    with pytest.raises(PromptError, match=f"a message has a part of type '{kind}', and hdtool answers text only"):
        read_prompts(file)
    file.write_text(json.dumps({"messages": [{"role": "user", "content": parts[:1]}]}) + "\n")
    assert read_prompts(file)[0].messages == ({"role": "user", "content": "What is this?"},)
