"""The model of a command is its first argument, or ``--model``; the first argument of generate may be the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from hdtool.cli.app import app, run
from hdtool.cli.command import MODEL_ARGUMENT, SHORT_NAMES, take_model
from hdtool.data import demo
from hdtool.data.errors import OptionError

COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
OTHER_ARGUMENTS = {"build-corpus-db", "inspect", "add", "bench-shape"}
"""Commands whose arguments name something else; they take ``--model``."""


def options_of(command: str) -> set[str]:
    return {name for parameter in COMMANDS[command].params for name in parameter.opts}


def taken(*words: str, **given: Any) -> dict[str, Any]:
    """What a command gets, without running it."""
    command = COMMANDS[given.pop("command", "generate")]
    context = command.make_context("hdtool", list(words))
    return {name: context.params[name] for name in ("model", "text", "prompt", "more_logs") if name in context.params}


@pytest.mark.parametrize("command", [name for name in COMMANDS if "--model" in options_of(name)])
def test_every_command_with_a_model_takes_it_as_an_argument(command: str) -> None:
    arguments = [one.name for one in COMMANDS[command].params if one.param_type_name == "argument"]
    if command in OTHER_ARGUMENTS:
        assert arguments and MODEL_ARGUMENT not in arguments
    elif command != "serve-vllm":
        assert arguments[0] == MODEL_ARGUMENT


def test_every_command_that_takes_a_model_as_an_argument_has_the_option() -> None:
    for name, command in COMMANDS.items():
        if any(one.name == MODEL_ARGUMENT for one in command.params):
            assert "--model" in options_of(name)


@pytest.mark.parametrize(
    ("words", "model", "text", "prompt"),
    [
        (["A prompt."], None, "A prompt.", None),
        (["-"], None, "-", None),
        (["smollm2", "A prompt."], "smollm2", "A prompt.", None),
        (["smollm2", "-"], "smollm2", "-", None),
        (["smollm2", "--prompt", "hi"], "smollm2", None, "hi"),
        (["--prompt", "hi", "smollm2"], "smollm2", None, "hi"),
        (["--model", "smollm2", "A prompt."], "smollm2", "A prompt.", None),
        (["A prompt.", "--model", "smollm2"], "smollm2", "A prompt.", None),
        (["--model", "smollm2", "smollm2", "A prompt."], "smollm2", "A prompt.", None),
        (["--model", "smollm2", "--prompt", "hi"], "smollm2", None, "hi"),
        (["-m", "smollm2", "-p", "hi"], "smollm2", None, "hi"),
        (["--prompt", "hi"], None, None, "hi"),
        ([], None, None, None),
    ],
)
def test_model_and_prompt_of_generate(
    words: list[str], model: str | None, text: str | None, prompt: str | None
) -> None:
    assert taken(*words) == {"model": model, "text": text, "prompt": prompt}


def test_a_file_of_prompts_leaves_the_argument_to_the_model() -> None:
    assert taken("smollm2", "--prompts", "prompts.jsonl")["model"] == "smollm2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b", "--model", "c"], "two models are named, a as an argument and c by --model: leave one out"),
        (["a", "b", "--model", "c"], "a prompt of several words needs quotes"),
        (["smollm2"], "smollm2 is a model and there is no prompt: hdtool generate smollm2 PROMPT, or hdtool chat smol"),
        ([str(demo.MODEL)], "is a model and there is no prompt"),
        (["a", "b", "c"], "unexpected extra argument"),
        (["a", "--model", "b", "--prompt", "c"], "a prompt and --prompt exclude each other"),
        (["a", "b", "--prompt", "c"], "a prompt and --prompt exclude each other"),
    ],
)
def test_what_is_ambiguous_is_refused(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *words]) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "model", "files"),
    [
        (["M", "--logs", "a"], "M", None),
        (["--model", "M", "--logs", "a"], "M", None),
        (["M", "--logs", "a", "b", "c"], "M", ["b", "c"]),
        (["--model", "M", "--logs", "a", "b", "c"], "M", ["b", "c"]),
        (["M", "--model", "M", "--logs", "a", "b"], "M", ["b"]),
    ],
)
def test_setup_with_files_as_a_wildcard_yields_them(words: list[str], model: str, files: list[str] | None) -> None:
    found = taken(*words, command="setup")
    assert found["model"] == model and (found["more_logs"] or None) == files


@pytest.mark.parametrize("command", [["setup", "--logs", "x"], ["export", "--out", "x"]])
def test_a_model_that_is_needed_is_asked_for(command: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(command) == 2
    assert f"hdtool {command[0]} needs a model: hdtool {command[0]} MODEL" in capfd.readouterr().err


@pytest.mark.parametrize("typed", [["embedded"], ["--model", "embedded"], ["-m", "embedded"]])
def test_both_ways_answer_alike(typed: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", *typed, "--prompt", "def read(path):", "-n", "3"]) == 0
    named = capfd.readouterr().out
    assert run(["generate", "def read(path):", "--max-new-tokens", "3"]) == 0
    assert named == capfd.readouterr().out != ""


@pytest.mark.parametrize(
    "command", ["verify", "bench-cost", "collect --prompts {prompts} --out {out}", "doctor", "export --out {out}"]
)
def test_a_model_that_is_not_there_is_named(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prompts").write_text("Hello.\n")
    name, *rest = command.format(prompts=tmp_path / "prompts", out=tmp_path / "out").split()
    missing = "./no-model"
    assert run([name, missing, *rest]) == 1
    first = capfd.readouterr()
    assert run([name, "--model", missing, *rest]) == 1
    second = capfd.readouterr()
    assert f"{missing} does not exist" in " ".join((first.err + first.out).split())
    assert first.err == second.err


def test_a_text_that_is_no_path_is_a_prompt() -> None:
    for text in ("a" * 5000, "~nobody-of-this-name/x", "nul\0byte.gguf", "What is smollm2?"):
        given = {MODEL_ARGUMENT: text, "model": None, "text": None, "prompt": None, "prompts": None}
        take_model("hdtool generate", given)
        assert given["text"] == text and given["model"] is None


def test_two_models_are_refused() -> None:
    with pytest.raises(OptionError, match="two models are named, a as an argument and b by --model"):
        take_model("hdtool chat", {MODEL_ARGUMENT: "a", "model": "b"})


def test_short_options() -> None:
    assert {"-m", "-p", "-n"} <= options_of("generate")
    assert {"-m", "-o", "-f"} <= options_of("build-model-db")
    for name in COMMANDS:
        typed = options_of(name)
        if name == "serve-vllm":
            assert not typed & set(SHORT_NAMES.values()), "they could be vLLM's"
        else:
            assert {SHORT_NAMES[option] for option in typed & set(SHORT_NAMES)} == typed & set(SHORT_NAMES.values())
