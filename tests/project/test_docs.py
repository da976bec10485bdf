"""The docs are complete: every command, folder and public name, and no dead link."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import hdtool
from hdtool.cli.app import VLLM_COMMAND, app
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.drafters import drafter_factory
from hdtool.runtime.settings.draft_sources import PLUGINS, unregister
from tests.command_reference import COMMANDS, PAGE, render
from tests.support.project import FILES, ROOT, blocks_of

DOCS = ROOT / "docs"
PAGES = sorted(ROOT.glob("*.md")) + sorted(DOCS.rglob("*.md"))


def test_every_command_has_its_place_in_the_reference() -> None:
    names = {
        "serve --engine vllm" if command.name == VLLM_COMMAND else command.name for command in app.registered_commands
    }
    assert names == set(COMMANDS) - {""}


def test_the_command_reference_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run `make docs`"


def test_every_option_is_explained() -> None:
    for command in (get_command(app), *get_command(app).commands.values()):  # type: ignore[attr-defined]
        assert command.help, command.name
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{command.name} {parameter.opts}"


def test_the_architecture_page_has_a_line_for_every_part() -> None:
    page = (DOCS / "dev" / "architecture.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([\w/]+)/` \|", page, re.MULTILINE)
    folders = {path.parent.relative_to(ROOT).parts for path in FILES}
    parts = {"/".join(folder[: 2 if folder[0] == "runtime" else 1]) for folder in folders}
    assert sorted(listed) == sorted(parts)


def test_the_architecture_page_quotes_the_loop() -> None:
    page = (DOCS / "dev" / "architecture.md").read_text(encoding="utf-8")
    quoted = blocks_of(page, "python")
    code = _without_space((ROOT / "runtime" / "core" / "session.py").read_text(encoding="utf-8"))
    assert len(quoted) == 3
    for part in quoted:
        assert _without_space(part) in code


def _without_space(text: str) -> str:
    """The formatter breaks lines of a page at other places, since they are not indented."""
    return "".join(text.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(r"`((?:builders|cli|data|runtime|tests)/[\w/]+\.py)`", page.read_text(encoding="utf-8")):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_python_reference_has_every_public_name_and_setting() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == sorted(hdtool.__all__)
    for config in (hdtool.ModelConfig, hdtool.SamplingConfig, hdtool.DecodeConfig, hdtool.StoresConfig):
        for field in fields(config):
            assert f"`{field.name}`" in page, f"{config.__name__}.{field.name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\((?!https?:|mailto:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")
    ):
        place = (page.parent / target).resolve() if target else page
        assert place.exists(), f"{page.name} links to {target}"
        assert DOCS not in page.parents or DOCS in place.parents, f"the site of the docs lacks {target}"
        assert not anchor or anchor in _anchors(place), f"{page.name} links to {target}#{anchor}"


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE)]
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}


def test_the_site_lists_every_page() -> None:
    _, nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert sorted(re.findall(r"\S+\.md$", nav, re.MULTILINE)) == sorted(pages)


def test_the_changelog_and_the_citation_have_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_the_logs_of_the_readme_ship() -> None:
    """A log is a file of the repository, or a command above makes it of one."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    made = {name: source for source, name in re.findall(r"^\$ head -n \d+ (\S+) > (\S+)$", readme, re.MULTILINE)}
    named = re.findall(r"--logs (\S+)", readme)
    assert named and all((ROOT / made.get(name, name)).is_file() for name in named), named


def test_the_rules_of_make_in_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"`make (\w+)`", readme):
        assert target in rules


def test_every_page_installs_hdtool_in_the_same_way() -> None:
    """`make test-newest` runs these lines of the README, and then the other commands there and in the index."""
    (recipe,) = re.findall(
        r"^```\n(pip install \.  .*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    for page in ("index.md", "getting-started/install.md", "getting-started/tutorial.md"):
        assert f"\n```\n{recipe}```\n" in (DOCS / page).read_text(encoding="utf-8"), page


def test_the_extras_that_are_named_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for file in (*PAGES, *FILES, ROOT / "Makefile"):
        for named in re.findall(r'"\.\[([\w,]+)\]', file.read_text(encoding="utf-8")):
            assert set(named.split(",")) <= set(extras), f"{file.name} names {named}"


def test_extras_are_installed_from_the_checkout() -> None:
    """hdtool is on no package index, so its name with an extra would install nothing."""
    told = [page for page in PAGES if "hdtool[" in page.read_text(encoding="utf-8")]
    assert told in ([], [ROOT / "CHANGELOG.md"])


def test_no_message_advises_what_pip_cannot_install() -> None:
    assert not [path for path in FILES if re.search(r"hdtool\[[a-z{]", path.read_text(encoding="utf-8"))]


@pytest.mark.long
def test_the_programs_of_the_python_page_run(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where drafts do not pay, as on a busy machine, none is accepted.
    monkeypatch.setattr(drafter_factory, "MeasuredBudget", lambda target, costs: FixedBudget())
    page = (DOCS / "guides" / "python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    try:
        for program in blocks_of(page, "python"):
            exec(program, names)
    finally:
        for number in PLUGINS:
            unregister(number)
    printed = capsys.readouterr().out
    assert re.match(r"\d+ tokens in \d+ steps\n", printed)
    assert " drafts accepted\n" in printed


def test_the_python_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (program,) = blocks_of(readme, "python")
    exec(program.replace('"smollm2"', '"embedded"'), {})  # SmolLM2's package may not be installed
    assert re.search(r"\d+ tokens in \d+ steps\n", capsys.readouterr().out)


def test_the_example_of_a_source_in_the_reference_registers() -> None:
    page = (DOCS / "reference" / "python.md").read_text(encoding="utf-8")
    (program,) = [block for block in blocks_of(page, "python") if "import DecodeConfig, Source, register" in block]
    names: dict[str, Any] = {}
    try:
        exec(program, names)
        assert names["config"].drafts_from.startswith("C") and len(names["config"].drafts_from) == 2
    finally:
        for number in PLUGINS:
            unregister(number)
