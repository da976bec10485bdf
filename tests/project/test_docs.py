"""The docs speak of what is there: every command, every file, no dead link."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
from typer.main import get_command

import hdtool
from hdtool.cli.app import app
from tests.command_reference import COMMANDS, PAGE, render
from tests.support.project import FILES, ROOT

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))


def test_every_command_has_its_place_in_the_reference() -> None:
    assert {command.name for command in app.registered_commands} == set(COMMANDS) - {""}


def test_the_command_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_option_is_explained() -> None:
    for command in (get_command(app), *get_command(app).commands.values()):  # type: ignore[attr-defined]
        assert command.help, command.name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{command.name} {parameter.opts}"


def test_the_architecture_page_has_a_line_for_every_folder() -> None:
    page = (ROOT / "docs" / "dev" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)
    assert sorted(listed) == sorted({path.parent.relative_to(ROOT).as_posix() for path in FILES})
    for name in re.findall(r"`((?:builders|cli|data|runtime)/[\w/]+\.py)`", page):
        assert (ROOT / name).exists(), f"docs/dev/architecture.md names {name}, which is gone"


def test_the_python_reference_has_every_public_name_and_setting() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == sorted(hdtool.__all__)
    for config in (hdtool.ModelConfig, hdtool.SamplingConfig, hdtool.DecodeConfig, hdtool.StoresConfig):
        for field in fields(config):
            assert f"`{field.name}`" in page, f"{config.__name__}.{field.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http:", "https:", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_changelog_speaks_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_commands_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert target in rules
    for command in re.findall(r"^\$ hdtool (\w[\w-]*)", readme, re.MULTILINE):
        assert command in COMMANDS


def test_the_programs_of_the_python_page_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path))
    page = (ROOT / "docs" / "guides" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for program in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(program, names)
    printed = capsys.readouterr().out
    assert re.match(r"\d+ tokens in \d+ steps\n", printed)
    assert " drafts accepted\n" in printed


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(program, {})
    assert re.search(r"\d+ tokens in \d+ steps\n", capsys.readouterr().out)
