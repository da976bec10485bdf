"""Commands, options and modules that the docs name exist: ``hdtool NAME --option``, ``--option``, ``hdtool.name``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

import hdtool
from hdtool.cli.app import VLLM_COMMAND, app, run
from hdtool.runtime.settings.draft_sources import ENTRY_POINTS
from tests.support.project import FENCED, ROOT, blocks_of

WRITTEN = ROOT / "docs" / "reference" / "commands.md"
"""The page that is written from the help itself."""
PAGES = [path for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))) if path != WRITTEN]
COMMANDS = get_command(app).commands  # type: ignore[attr-defined]
SHELLS = ("", "console")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
PLACEHOLDER = "COMMAND"
OF_ALL = {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}
OF_VLLM = {
    *("--additional-config", "--api-key", "--data-parallel-size", "--enable-scale-out", "--host", "--logprobs-mode"),
    *("--max-log-len", "--max-logprobs", "--port", "--served-model-name", "--ssl-certfile", "--ssl-keyfile"),
    *("--tensor-parallel-size", "--uds", "--weight-transfer-config"),
}
"""What ``hdtool serve --engine vllm`` hands on."""
OF_OTHERS = OF_VLLM | {
    *("--no-deps",),  # of pip
    *("--speculative-num-draft-tokens", "--speculative-ngram-external-corpus-max-tokens"),  # of SGLang
    *("--spec-type",),  # of llama.cpp
    *("--usage", "--docs", "--kind", "--dry", "--drafters"),  # of llm and of tests
}
"""Options of other programs, which pages name without the program."""


@cache
def options_of(command: str) -> frozenset[str]:
    found = {option for one in COMMANDS[command].params for option in (*one.opts, *one.secondary_opts)}
    return frozenset(found | OF_ALL | (OF_VLLM if command == VLLM_COMMAND else set()))


def wrong_commands(text: str) -> Iterator[str]:
    """Yield what a page shows as a command of hdtool and what is none, and options that a command doesn't have."""
    text = text.replace("\\\n", " ")
    blocks = [block for language in SHELLS for block in blocks_of(text, language)]
    lines = [part for block in blocks for line in block.splitlines() for part in re.split(r"&&|;|\|", line)]
    lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", FENCED.sub("", text))]
    for line in lines:
        shown = re.match(r"\s*(?:\$ |> )?(?:\w+=\S* |torchrun .*)*\bhdtool +(.*)", line.partition("  #")[0])
        if not shown or shown[1].startswith(("-", "=")):
            continue
        name, _, rest = shown[1].partition(" ")
        name = VLLM_COMMAND if name == "serve" and "--engine vllm" in rest else name
        if name != PLACEHOLDER and name not in COMMANDS:
            yield f"hdtool {name}"
        elif name != PLACEHOLDER:
            yield from (f"hdtool {name} {one}" for one in options_in(rest) if one not in options_of(name))


def options_in(text: str) -> list[str]:
    """Options of a command, without what is quoted."""
    return OPTION.findall(re.sub(r"\"[^\"]*\"|'[^']*'", "", text))


def wrong_options(text: str) -> Iterator[str]:
    """Yield options that stand alone in text and that no command has."""
    known = {option for name in COMMANDS for option in options_of(name)} | OF_OTHERS
    for span in re.findall(r"`(--[^`]+)`", FENCED.sub("", text)):
        yield from (option for option in options_in(span) if option not in known)


def wrong_names(text: str) -> Iterator[str]:
    """Yield dotted names below ``hdtool`` that nothing defines."""
    for name in re.findall(r"(?<![\w./-])hdtool((?:\.\w+)+)(?![\w/-])", text):
        if f"hdtool{name}" not in (ENTRY_POINTS, "hdtool.py") and not is_defined(name[1:].split(".")):
            yield f"hdtool{name}"


def is_defined(parts: list[str]) -> bool:
    """True for a public name, and for a folder or a module of the project, or what it defines; nothing is imported."""
    if parts[0] in hdtool.__all__ or parts == ["egg"]:
        return True
    place = ROOT
    for number, part in enumerate(parts, 1):
        place /= part
        if place.with_suffix(".py").exists():
            return number == len(parts) or parts[number] in defined_in(place.with_suffix(".py"))
        if not (place / "__init__.py").exists():
            return number == len(parts) and part in defined_in(place.parent / "__init__.py")
    return True


def defined_in(module: Path) -> set[str]:
    if not module.exists():
        return set()
    parts = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    imported = {
        alias.asname or alias.name for part in parts if isinstance(part, ast.ImportFrom) for alias in part.names
    }
    return imported | {part.name for part in parts if isinstance(part, ast.ClassDef | ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [*wrong_commands(text), *wrong_options(text), *wrong_names(text)] == []


def test_wrong_names_are_found() -> None:
    page = (
        "`hdtool generate --nothing 1` and `hdtool bulid-model-db` and `hdtool serve --engine vllm --tensor 2`\n"
        "with `--no-such-option`, `--draft-tokens`, `hdtool.load`, `hdtool.nothing` and `hdtool.cli.app.none`\n"
        '```\n$ cat x && hdtool bench MODEL \\\n    --methods ar --wrong\nhdtool generate "--inside" | head --lines 1\n'
        "torchrun --no-python hdtool generate --false\nHOME=x hdtool replay --absent  # --comment\n```\n"
    )
    assert list(wrong_commands(page)) == [
        "hdtool bench --wrong",
        "hdtool generate --false",
        "hdtool replay --absent",
        "hdtool generate --nothing",
        "hdtool bulid-model-db",
        "hdtool serve-vllm --tensor",
    ]
    assert list(wrong_options(page)) == ["--no-such-option"]
    assert list(wrong_names(page)) == ["hdtool.nothing", "hdtool.cli.app.none"]


def test_help_shows_the_options_that_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--help-all"]) == 0
    shown = set(OPTION.findall(capsys.readouterr().out))
    assert {option for option in options_of("replay") - OF_ALL if option.startswith("--")} <= shown
