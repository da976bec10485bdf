"""The command-line tool ``llm`` and its Python interface, with hdtool's models."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hdtool.data import demo
from hdtool.data.texts_and_traces import RecordReader
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import Loaded, load
from tests.server.plain import plain_text

llm = pytest.importorskip("llm", reason="not installed: pip install 'hdtool[llm]'")

QUESTION = "What does `len` do?"
COMMANDS = """
import json, sys
from click.testing import CliRunner
from llm.cli import cli

def run(arguments):
    done = CliRunner().invoke(cli, arguments)
    return [done.exit_code, done.stdout, done.stderr]

listed = run(["models", "-q", "hdtool/"])
assert "torch" not in sys.modules
print(json.dumps([listed, *map(run, json.loads(sys.argv[1]))]))
"""
"""Program that lists hdtool's models, which may not load torch, and runs commands of ``llm`` in one process."""


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(ModelConfig(threads=1))


@pytest.fixture(scope="module")
def model() -> Any:
    from hdtool.runtime.integrations.llm_plugin import HdtoolModel

    return HdtoolModel("embedded", demo.EMBEDDED)


def outcomes(home: Path, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Return the exit codes, outputs and errors of ``COMMANDS`` through the entry point of the installed hdtool."""
    environment = os.environ | {"LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": "hdtool"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS, json.dumps(commands)],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(outcome) for outcome in json.loads(done.stdout)]


def sources_of(usage: Any) -> dict[str, int]:
    return {name: counts["accepted"] for name, counts in usage.details.get("sources", {}).items()}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_an_answer_is_that_of_plain_decoding_and_its_drafts_are_counted(
    model: Any, loaded: Loaded, temperature: float
) -> None:
    response = model.prompt(QUESTION, max_tokens=24, temperature=temperature, seed=5)
    pieces = list(response)
    assert "".join(pieces) == plain_text(loaded, QUESTION, 24, temperature=temperature, seed=5)
    usage = response.usage()
    assert usage.output == 24 and usage.input > 0
    assert 1 < len(pieces) <= usage.details["steps"] + 1
    assert sum(sources_of(usage).values()) == 24 - usage.details["steps"]
    assert usage.details["tokens_per_step"] == round(24 / usage.details["steps"], 2)
    assert response.json() == {"finish": "length"}


def test_a_conversation_keeps_the_model_its_text_and_its_cache(model: Any) -> None:
    conversation = model.conversation()
    first = conversation.prompt(QUESTION, system="Be brief.", max_tokens=16)
    first.text()
    answerer = model._answerer
    second = conversation.prompt("And `abs`?", max_tokens=16, temperature=0.7)
    second.text()
    assert model._answerer is answerer
    assert second.usage().details["cached_tokens"] >= first.usage().input
    alone = model.prompt("And `abs`?", max_tokens=16, temperature=0.7)
    alone.text()
    assert alone.usage().input < second.usage().input


def test_an_answer_follows_a_schema_and_ends_at_a_stop_text(model: Any) -> None:
    schema = {"type": "object", "properties": {"age": {"enum": [36, 37]}}, "required": ["age"]}
    answer = model.prompt("Ada is 36 years old.", schema={**schema, "additionalProperties": False}, max_tokens=40)
    assert json.loads(answer.text())["age"] in (36, 37)
    whole = model.prompt(QUESTION, max_tokens=16).text()
    assert model.prompt(QUESTION, max_tokens=16, stop=whole[5:8]).text() == whole[: whole.index(whole[5:8])]


def test_other_drafting_settings_load_the_model_again(model: Any) -> None:
    drafted = model.prompt(QUESTION, max_tokens=16)
    plain = model.prompt(QUESTION, max_tokens=16, method="ar")
    assert plain.text() == drafted.text()
    assert plain.usage().details == {"tokens_per_step": 1.0, "steps": 16}


@pytest.mark.parametrize(
    ("question", "options", "said"),
    [
        ("", {}, "there is nothing to answer: give a prompt"),
        (QUESTION, {"temperature": -1.0}, "--temperature must be 0 (greedy) or more, got -1.0"),
        (QUESTION, {"model_db": "nowhere"}, "nowhere holds no store: build one, or name the folder of one"),
    ],
)
def test_an_error_is_one_line_for_the_user(model: Any, question: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(llm.ModelError) as caught:
        model.prompt(question, **options).text()
    assert str(caught.value) == said


def test_async_answers_wait_for_each_other_and_may_be_left(model: Any) -> None:
    from hdtool.runtime.integrations.llm_plugin import AsyncHdtoolModel

    questions = (QUESTION, "def read(path):", "class Stack:")
    expected = [model.prompt(question, max_tokens=16).text() for question in questions]
    twin = AsyncHdtoolModel(model)

    async def ask() -> tuple[list[str], int]:
        async for piece in twin.prompt(QUESTION, max_tokens=100_000):
            assert piece
            break
        with pytest.raises(llm.ModelError, match="must be 0"):
            await twin.prompt(QUESTION, temperature=-1.0).text()
        responses = [twin.prompt(question, max_tokens=16) for question in questions]
        texts = await asyncio.gather(*(response.text() for response in responses))
        return texts, (await responses[-1].usage()).output

    assert asyncio.run(ask()) == (expected, 16)


@pytest.mark.long
def test_the_commands_of_llm(tmp_path: Path) -> None:
    """With the tool's own home and log."""
    asked = ["-m", "hdtool/mine", "-o", "max_tokens", "12"]
    commands = [
        ["hdtool", "add", str(demo.MODEL), "--name", "mine"],
        ["hdtool", "add", str(tmp_path / "missing.gguf")],
        ["models", "-q", "hdtool/"],
        [*asked, "--usage", QUESTION],
        ["-c", "-o", "max_tokens", "4", "And `abs`?"],
        ["logs", "-n", "1", "--json"],
        ["logs", "-u"],
        [*asked, "-o", "temperature", "-1", QUESTION],
        ["hdtool", "remove", "hdtool/mine"],
        ["hdtool", "remove", "mine"],
    ]
    listed, added, missing, all_models, answer, goes_on, logged, usages, refused, removed, gone = outcomes(
        tmp_path, commands
    )
    assert listed[1].splitlines() == ["HdtoolModel: hdtool/smollm2", "HdtoolModel: hdtool/embedded"]
    assert added[1] == "added hdtool/mine\n"
    assert missing[0] == 1 and "missing.gguf is no folder or file here" in missing[2]
    assert all_models[1].splitlines()[2] == "HdtoolModel: hdtool/mine"
    assert answer[0] == 0 and '12 output, {"tokens_per_step": ' in answer[2]
    assert goes_on[0] == 0
    (turn,) = json.loads(logged[1])
    assert (turn["model"], turn["output_tokens"]) == ("hdtool/mine", 4)
    assert json.loads(turn["token_details"])["cached_tokens"] > 0
    assert usages[1].count("tokens_per_step") == 2
    assert refused[0] == 1 and refused[2] == "Error: --temperature must be 0 (greedy) or more, got -1.0\n"
    (conversation,) = RecordReader([tmp_path / "logs.db"])
    assert conversation.texts[:3] == (QUESTION, answer[1].removesuffix("\n"), "And `abs`?")
    assert removed[0] == 0 and gone[0] == 1 and "no model mine was added" in gone[2]


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 5}'])
@pytest.mark.one_in(3)
def test_a_damaged_list_of_models_is_named_and_kept(tmp_path: Path, content: str) -> None:
    (path := tmp_path / "hdtool-models.json").write_text(content)
    commands = [["hdtool", "add", str(demo.MODEL)], ["hdtool", "remove", "a"], ["models", "-q", "hdtool/"]]
    listed, *changes, again = outcomes(tmp_path, commands)
    assert listed[:2] == again[:2] == (0, "HdtoolModel: hdtool/smollm2\nHdtoolModel: hdtool/embedded\n")
    said = f"{path} is there and is not a JSON object with the places of models by their names: mend it, "
    assert listed[2].startswith(f"warning: {said}") and listed[2].count("\n") == 1
    for code, _, errors in changes:
        assert code == 1 and errors.startswith(f"Error: {said}") and errors.count("\n") == 1
    assert path.read_text() == content


def test_a_model_takes_no_name_of_another(tmp_path: Path) -> None:
    commands = [
        ["hdtool", "add", str(demo.MODEL), "--name", "hdtool/mine"],
        ["hdtool", "add", str(demo.MODEL), "--name", "mine"],
        ["hdtool", "add", "owner/other", "--name", "mine"],
        ["hdtool", "add", "owner/other", "--name", "smollm2"],
        ["models", "-q", "hdtool/"],
    ]
    _, added, again, *refused, listed = outcomes(tmp_path, commands)
    assert added == again == (0, "added hdtool/mine\n", "")
    for (code, _, errors), name, place in zip(refused, ("mine", "smollm2"), (demo.MODEL, "smollm2"), strict=True):
        advice = "choose another one with --name"
        assert (code, errors) == (1, f"Error: hdtool/{name} is the name of {place} already: {advice}\n")
    assert listed[1].splitlines()[2:] == ["HdtoolModel: hdtool/mine"]
    assert json.loads((tmp_path / "hdtool-models.json").read_text()) == {"mine": str(demo.MODEL)}
