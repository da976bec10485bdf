"""Every option that has no effect with the chosen method, or with another option, is refused by name."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from itertools import product
from typing import Any

import pytest
from typer.main import get_command

from hdtool.cli.app import COMMAND_SECTIONS, VLLM_COMMAND, app, run
from hdtool.cli.command import SCREEN_LINES, refuse_without_effect, use_of
from hdtool.data.errors import OptionError
from hdtool.runtime.drafters import drafter_factory
from hdtool.runtime.settings.decoding import HIERARCHIES, METHODS, NEED_LOGITS, DecodeConfig, StoresConfig
from hdtool.runtime.settings.settings_base import Panel

VALUES = {
    "draft_tokens": "4",
    "sources": "context",
    "order": "SMC",
    "lookahead": None,
    "heads": "folder",
    "drafter": "folder",
    "history": "folder",
    "history_prompts": None,
    "prediction": "file",
    "tree": "static",
    "model_db": "folder",
    "corpus_db": "folder",
}
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
USED_BY = {
    parameter.name: methods
    for command in ("export", "generate")
    for parameter in COMMANDS[command].params
    if (methods := use_of(COMMANDS[command], parameter.name).methods)
}


def refusal(name: str, given: Mapping[str, object], command: str = "generate") -> str:
    try:
        refuse_without_effect(name, use_of(COMMANDS[command], name), {"draft_tokens": 4, "history": "memory", **given})
    except OptionError as error:
        return str(error)
    return ""


def test_the_options_that_depend_on_the_method_are_known() -> None:
    assert set(USED_BY) == set(VALUES)


@pytest.mark.parametrize(("method", "option"), list(product(METHODS, VALUES)))
def test_every_method_with_every_option(method: str, option: str) -> None:
    told = refusal(option, {"method": method, option: VALUES[option]})
    if method in USED_BY[option]:
        assert told == ""
    else:
        assert told.startswith(f"--{option.replace('_', '-')} has no effect with method {method} (it belongs to ")


@pytest.mark.parametrize("command", ["generate", "verify", "replay", "bench", "bench-shape"])
def test_the_options_of_the_table_are_those_of_the_commands(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    names = {parameter.name for parameter in COMMANDS[command].params} & set(USED_BY)
    assert {"draft_tokens", "model_db", "corpus_db"} <= names
    listed = command in ("replay", "bench", "bench-shape")
    required = {"replay": ["--traces", "x"], "bench-shape": ["tiny", "--traces", "x"]}.get(command, [])
    for name in sorted(names):
        value = None if (command, name) == ("replay", "history") else VALUES[name]
        typed = [f"--{name.replace('_', '-')}", *([value] if value else [])]
        for method in METHODS:
            if method in USED_BY[name] or (listed and method in NEED_LOGITS):
                continue
            arguments = [command, *required, "--methods" if listed else "--method", method, *typed]
            assert run(arguments) == 2
            assert f"{typed[0]} has no effect with method {method}" in capfd.readouterr().err


def test_the_table_says_what_the_drafters_use() -> None:
    """The number of draft tokens is used where a method asks for a budget."""

    class AskedError(Exception):
        pass

    def budget() -> Any:
        raise AskedError

    for method, maker in drafter_factory.DRAFTER_FACTORIES.items():
        source = inspect.getsource(maker)
        assert ("budget()" in source) == (method in USED_BY["draft_tokens"]), method
    with pytest.raises(AskedError):
        drafter_factory.drafter_with_budget(budget, DecodeConfig("hd"), _no_stores())


def _no_stores() -> Any:
    from hdtool.runtime.stores.store_set import StoreSet

    return StoreSet()


def test_none_for_a_store_is_always_allowed() -> None:
    for method in METHODS:
        assert refusal("model_db", {"method": method, "model_db": "none"}) == ""
    assert StoresConfig(model_db="none").model_db == "none"


def test_one_of_several_methods_is_enough() -> None:
    assert refusal("draft_tokens", {"methods": ["ar,pld", "hd"]}, "bench") == ""
    assert refusal("draft_tokens", {"methods": None}, "bench") == ""
    assert "with method ar, generate" in refusal("draft_tokens", {"methods": ["ar, generate"]}, "bench")
    shape = {"methods": None, "shape": "tiny", "tree": "static"}
    assert "no effect" in refusal("tree", shape, "bench"), "the shape's own methods"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "--prompt", "x", "--top-p", "0.9"], "--top-p has no effect with greedy decoding: set --temper"),
        (["collect", "--prompts", "x", "--out", "y", "--top-k", "9"], "--top-k has no effect with greedy decoding"),
        (
            ["generate", "--prompt", "x", "--prediction", "y", "--draft-tokens", "0"],
            "effect with --draft-tokens 0: leave",
        ),
        (["generate", "--prompt", "x", "--json", "--color"], "--show-drafts has no effect with --json"),
        (["build-corpus-db", "x", "--out", "y", "--namespace", "z"], "--namespace has no effect with --out"),
        (["build-corpus-db", "x", "--address", "a:1"], "--address has no effect without --engine ray"),
        (["inspect", "x", "--model", "y"], "--model has no effect without --after or --ngrams"),
        (["train-heads", "--from", "x", "--out", "y", "--medusa", "--mlp", "8"], "--mlp has no effect with --medusa"),
        (["bench", "--temperatures", "0.5"], "--temperatures has no effect without --report"),
        (["bench-cost", "--rounds", "9"], "No such option"),
        (["bench-shape", "tiny", "--traces", "x", "--report", "y"], "No such option"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    assert said in capfd.readouterr().err


# Help and completion ---------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_in_panels_and_examples_at_the_end(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "option" and parameter.name != "help":
            assert parameter.rich_help_panel in list(Panel), parameter.name
    typed = "serve --engine vllm" if command == VLLM_COMMAND else command
    assert run([*typed.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Examples:") > shown.index("--help")
    examples = shown.split("Examples:\n")[1].splitlines()
    name, *engine = typed.split(" ", 1)
    assert len(examples) == 2 and all(line.startswith(f"  hdtool {name}") for line in examples)
    assert all(option in line for option in engine for line in examples)


def test_the_list_of_commands_begins_where_a_new_user_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= SCREEN_LINES
    listed = shown.split("Start here:\n")[1]
    assert listed.split()[0] == "demo"
    assert re.findall(r"^  ([\w-]+) ", listed, re.MULTILINE) == [name for name in COMMANDS if name != VLLM_COMMAND]
    assert re.findall(r"^([\w ]+):", listed, re.MULTILINE) == list(COMMAND_SECTIONS)[1:]
    assert "..." not in listed and "\N{NON-BREAKING HYPHEN}" not in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_on_a_screen_and_help_all_shows_every_option(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    typed = ["serve", "--engine", "vllm"] if command == VLLM_COMMAND else [command]
    assert run([*typed, "--help-all"]) == 0
    whole = capsys.readouterr().out
    names = {name for one in COMMANDS[command].params for name in one.opts if name.startswith("--")}
    assert not {name for name in names if not _shows(name, whole)}
    described = [name for name, method in METHODS.items() if f"  {name} " in whole and method.description[:20] in whole]
    assert described == (list(METHODS) if names & {"--method", "--methods"} else [])
    assert run([*typed, "--help"]) == 0
    usual = capsys.readouterr().out
    assert len(usual.splitlines()) <= SCREEN_LINES
    assert all(len(line) <= 80 for line in usual.split("Examples:")[0].splitlines())
    if len(whole.splitlines()) <= SCREEN_LINES:
        assert usual == whole
        return
    for parameter in COMMANDS[command].params:
        if parameter.param_type_name == "argument":
            continue
        first = next(name for name in parameter.opts if name.startswith("--"))
        line = re.search(rf"^  (-\w, )?{first} .*\n(?!   )", usual, re.MULTILINE)
        assert bool(line) != use_of(COMMANDS[command], parameter.name).rare, (
            f"{first} has one line if many users need it"
        )
        assert not parameter.required or (line and "[required]" in line[0]), first


def _shows(name: str, help: str) -> bool:
    options = help.split("Examples:")[0]
    return bool(re.search(rf"^  (-\w, )?(--\S+[/,] )?{name}( |,|$)", options, re.MULTILINE))


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("hdtool generate --method hd+", [name for name in HIERARCHIES if name != "hd"]),
        ("hdtool generate --dtype bf", ["bfloat16"]),
        ("hdtool generate --quantization n", ["nf4"]),
        ("hdtool bench --methods ar,pl", ["ar,pld"]),
        ("hdtool bench-shape llama-3", ["llama-3-8b"]),
    ],
)
def test_values_are_completed(words: str, completed: list[str]) -> None:
    environment = os.environ | {
        "_HDTOOL_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    program = "from hdtool.cli.app import main; main()"
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == completed
