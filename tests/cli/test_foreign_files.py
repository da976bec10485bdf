"""What hdtool did not create stays as it is, whatever command writes to whatever destination."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hdtool.cli.app import run
from hdtool.data.own_files import PNG_ENTRY, PNG_MAGIC
from tests.support.scratch import Scratch, new_scratch

TEXT = "one line without its end"
NAMES = (
    "thesis.tex",
    "photo.jpg",
    ".hidden",
    "notes/deep/diary.txt",
    "documents.bin",
    "documents-12345678.txt",
    ".thesis.tex.0123456789abcdef",
)
"""Of files that no command writes."""
OWN_NAMES = (
    "manifest.json",
    "documents-0123456789.bin",
    "config.json",
    "heads.safetensors",
    "checkpoint.pt",
    "training.png",
    "run.json",
    "ar.jsonl",
    "pld.jsonl",
    "cost.json",
    "cost.png",
    "index.html",
    "tables.md",
    "speed-up.png",
    "generation-time.png",
    "repeated-4-grams.png",
    "sources-pld.dark.png",
)
"""Of files that commands write, or nearly."""


@dataclass(frozen=True)
class Command:
    """A command that writes to one place."""

    name: str
    into_file: bool = False
    """Whether the place is a file; it is a folder as a rule."""
    begin_with: str | None = None
    """The name of the store that must be at the place."""
    at_home: bool = False
    """Whether the place is hdtool's home."""
    input: str = "prompts.jsonl"
    """The input that a file would replace."""


COMMANDS = {
    command.name: command
    for command in (
        Command("build-model-db"),
        Command("build-corpus-db"),
        Command("merge"),
        Command("add", begin_with="one"),
        Command("drop", begin_with="both"),
        Command("collect", into_file=True),
        Command("convert", into_file=True, input="answers.jsonl"),
        Command("train-heads"),
        Command("bench"),
        Command("bench-cost"),
        Command("bench --report"),
        Command("replay --steps", into_file=True, input="answers.jsonl"),
        Command("replay --report"),
        Command("a build at home", at_home=True),
        Command("a cost at home", at_home=True),
    )
}


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    return new_scratch(tmp_path_factory.mktemp("template") / "scratch")


@pytest.fixture
def scratch(home: Path, template: Scratch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scratch:
    found = template.copied_to(tmp_path / "scratch")
    monkeypatch.chdir(found.root)
    # Drawing takes seconds; only the names and the origin of pictures matter here.
    monkeypatch.setattr("hdtool.builders.evaluation.report.pages.render_png", lambda *_: PNG_MAGIC + PNG_ENTRY)
    return found


def litter(folder: Path, names: tuple[str, ...]) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(path):
            path.write_text(f"{name}: {TEXT}")


def contents(root: Path) -> dict[str, str]:
    """The hash of every file and the target of every link below a folder."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink():
                found[str(path)] = f"link to {os.readlink(path)}"
            elif path.is_file():
                found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def carried_out(command: Command, scratch: Scratch, out: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    if command.at_home:
        monkeypatch.setenv("HDTOOL_HOME", str(out))
    return run(scratch.command(command.name, out))


def place_in(command: Command, folder: Path) -> Path:
    return folder / "out.jsonl" if command.into_file else folder


# Destinations: each prepares one and returns it --------------------------------------------------


def foreign_files(command: Command, scratch: Scratch) -> Path:
    litter(scratch.root / "out", NAMES)
    return place_in(command, scratch.root / "out")


def foreign_files_of_our_names(command: Command, scratch: Scratch) -> Path:
    litter(scratch.root / "out", (*NAMES, *OWN_NAMES, ".lock", "out.jsonl", ".out.jsonl.lock"))
    return place_in(command, scratch.root / "out")


def _our_own(command: Command, scratch: Scratch) -> Path:
    out = place_in(command, scratch.root / "out")
    if command.begin_with:
        shutil.copytree(scratch.store("corpus", command.begin_with), out)
    else:
        out.parent.mkdir(exist_ok=True)
        assert run(scratch.command(command.name, out)) == 0
    return out


def our_own_and_foreign_files(command: Command, scratch: Scratch) -> Path:
    out = _our_own(command, scratch)
    litter(scratch.root / "out", NAMES)
    return out


def our_own_and_foreign_files_of_our_names(command: Command, scratch: Scratch) -> Path:
    out = _our_own(command, scratch)
    litter(scratch.root / "out", (*NAMES, *OWN_NAMES))
    return out


def the_inputs(command: Command, scratch: Scratch) -> Path:
    litter(scratch.inputs, NAMES)
    return scratch.inputs / command.input if command.into_file else scratch.inputs


def the_model(command: Command, scratch: Scratch) -> Path:
    return scratch.model / "config.json" if command.into_file else scratch.model


def a_foreign_file(command: Command, scratch: Scratch) -> Path:
    (scratch.root / "out").write_text("several lines\nof a poem\n")
    return scratch.root / "out"


def a_line_without_its_end(command: Command, scratch: Scratch) -> Path:
    (scratch.root / "out").write_text(TEXT)
    return scratch.root / "out"


def a_link_to_a_foreign_file(command: Command, scratch: Scratch) -> Path:
    litter(scratch.root, ("elsewhere/thesis.tex",))
    (scratch.root / "out").symlink_to(scratch.root / "elsewhere" / "thesis.tex")
    return scratch.root / "out"


def a_link_to_foreign_files(command: Command, scratch: Scratch) -> Path:
    litter(scratch.root / "elsewhere", NAMES)
    (scratch.root / "out").symlink_to(scratch.root / "elsewhere")
    return place_in(command, scratch.root / "out")


def foreign_links_of_our_names(command: Command, scratch: Scratch) -> Path:
    litter(scratch.root / "elsewhere", (*OWN_NAMES, "out.jsonl"))
    (scratch.root / "out").mkdir()
    for name in (*OWN_NAMES, "out.jsonl"):
        (scratch.root / "out" / name).symlink_to(scratch.root / "elsewhere" / name)
    return place_in(command, scratch.root / "out")


def a_dangling_link(command: Command, scratch: Scratch) -> Path:
    (scratch.root / "out").symlink_to(scratch.root / "nowhere")
    return scratch.root / "out"


def a_read_only_place(command: Command, scratch: Scratch) -> Path:
    folder = scratch.root / "locked"
    litter(folder, NAMES)
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        place.chmod(0o555)
    if os.access(folder, os.W_OK):  # as root, who cannot write here
        folder = Path("/proc/hdtool")
    return place_in(command, folder / "out")


DESTINATIONS = (
    foreign_files,
    foreign_files_of_our_names,
    our_own_and_foreign_files,
    our_own_and_foreign_files_of_our_names,
    the_inputs,
    the_model,
    a_foreign_file,
    a_line_without_its_end,
    a_link_to_a_foreign_file,
    a_link_to_foreign_files,
    foreign_links_of_our_names,
    a_dangling_link,
    a_read_only_place,
)
SUCCEEDS = (our_own_and_foreign_files,)
"""Destinations to which every command can write."""
FAILS = (a_foreign_file, a_line_without_its_end, a_link_to_a_foreign_file, a_read_only_place)
"""Destinations to which no command can write."""


@pytest.mark.each_value
@pytest.mark.usefixtures("known_cost")
@pytest.mark.parametrize("destination", DESTINATIONS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("name", COMMANDS)
def test_foreign_files_survive(
    name: str,
    destination: Callable[[Command, Scratch], Path],
    scratch: Scratch,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    command = COMMANDS[name]
    own_before = contents(scratch.root)
    if command.at_home:
        monkeypatch.setenv("HDTOOL_HOME", str(scratch.root / "out"))
    out = destination(command, scratch)
    foreign = contents(scratch.root)
    if destination in (our_own_and_foreign_files, our_own_and_foreign_files_of_our_names):
        litter_text = {hashlib.sha256(f"{each}: {TEXT}".encode()).hexdigest() for each in (*NAMES, *OWN_NAMES)}
        foreign = {path: found for path, found in foreign.items() if path in own_before or found in litter_text}
    capfd.readouterr()
    code = carried_out(command, scratch, out, monkeypatch)
    printed = capfd.readouterr()
    found = contents(scratch.root)
    assert {path: found.get(path) for path in foreign} == foreign
    if code:
        errors = [line for line in printed.err.splitlines() if line.startswith("error: ")]
        assert code in (1, 2) and len(errors) == 1 and "Traceback" not in printed.err
        assert printed.err.splitlines()[-1] == errors[0]
    if destination in SUCCEEDS:
        assert code == 0, printed.err
    if destination in FAILS:
        assert code, "nothing was refused"
