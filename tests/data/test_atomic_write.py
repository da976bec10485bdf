"""Replacing files: the old content or the new one, and nothing that hdtool did not write."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from hdtool.data import own_files
from hdtool.data.errors import ResultError
from hdtool.data.output_files import OutputFile

MARK = "<!-- hdtool report -->\n"
STALE = "0123456789abcdef"


def output(path: Path) -> OutputFile:
    return OutputFile(path, "a report", own_files.is_own_markdown, ResultError)


def refusal(act: Callable[[], object]) -> str:
    with pytest.raises(ResultError) as caught:
        act()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_new_content_replaces_the_old(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "file.md"
    for text in ("first", "second"):
        output(place).check()
        output(place).write(MARK + text)
        assert place.read_text() == MARK + text
    assert list(place.parent.iterdir()) == [place]


def test_an_error_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "file.md"
    place.write_text(MARK)
    with pytest.raises(ValueError, match="stop"), output(place).replaced() as stream:
        stream.write(b"half of the n")
        raise ValueError("stop")
    assert place.read_text() == MARK
    assert list(tmp_path.iterdir()) == [place]


def test_a_full_disk_is_worded(tmp_path: Path) -> None:
    def fill() -> None:
        with output(tmp_path / "file.md").replaced():
            raise OSError(28, "No space left on device")

    assert "file.md cannot be written (No space left on device): choose another --out" in refusal(fill)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["mine", "a line without its end", "\n", "x" * 100_000])
def test_a_file_of_another_origin_is_neither_replaced_nor_removed(tmp_path: Path, content: str) -> None:
    place = tmp_path / "file.md"
    place.write_text(content)
    for act in (output(place).check, lambda: output(place).write(MARK), output(place).remove, output(place).exists):
        assert "file.md is there and is not a report: choose another --out, or move it away" in refusal(act)
    assert place.read_text() == content and list(tmp_path.iterdir()) == [place]


def test_a_file_that_appears_during_the_write_is_kept(tmp_path: Path) -> None:
    def write() -> None:
        with output(tmp_path / "file.md").replaced() as stream:
            stream.write(MARK.encode())
            (tmp_path / "file.md").write_text("mine")

    assert "is not a report" in refusal(write)
    assert (tmp_path / "file.md").read_text() == "mine"


def test_an_empty_file_may_be_replaced(tmp_path: Path) -> None:
    place = tmp_path / "file.md"
    place.touch()
    assert not output(place).exists()
    output(place).write(MARK)
    assert output(place).exists()
    output(place).remove()
    assert not place.exists()


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_a_link(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "folder" / "target.md", tmp_path / "link.md"
    target.parent.mkdir()
    if there:
        target.write_text(MARK)
    link.symlink_to(target)
    output(link).write(MARK + "new")
    assert link.is_symlink() and target.read_text() == MARK + "new"
    assert list(target.parent.iterdir()) == [target]


def test_a_folder_that_a_dangling_link_names_is_made(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    output(tmp_path / "link" / "file.md").check()
    output(tmp_path / "link" / "file.md").remove()
    output(tmp_path / "link" / "file.md").write(MARK)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "folder" / "file.md").read_text() == MARK


def test_a_link_to_a_file_of_another_origin_is_refused(tmp_path: Path) -> None:
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("mine")
    link.symlink_to(target)
    assert "link.md is there and is not a report" in refusal(lambda: output(link).write(MARK))
    assert link.is_symlink() and target.read_text() == "mine"


def test_places_that_hold_no_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    places = {
        "folder": "it is a folder",
        "circle": "its links form a circle",
        "pipe": "it is not a regular file",
        "file/below": "is not a folder",
    }
    for name, reason in places.items():
        assert reason in refusal(output(tmp_path / name).check)
        refusal(lambda name=name: output(tmp_path / name).write(MARK))  # type: ignore[misc]


def test_a_read_only_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    assert f"{tmp_path} is read-only" in refusal(output(tmp_path / "new" / "file.md").check)
    assert not list(tmp_path.iterdir())


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        output(tmp_path / "file.md").write(MARK)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file.md").stat().st_mode) == 0o640


def test_temporary_names_differ_and_a_planted_link_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set()
    for _ in range(8):
        with output(tmp_path / "file.md").replaced() as stream:
            stream.write(MARK.encode())
            names |= {path.name for path in tmp_path.iterdir() if path.name != "file.md"}
    assert len(names) == 8
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f".file.md.{STALE}.tmp").symlink_to(tmp_path / "precious")
    monkeypatch.setattr("secrets.token_hex", lambda size: STALE)
    assert "cannot be written (File exists)" in refusal(lambda: output(tmp_path / "file.md").write(MARK))
    assert (tmp_path / "precious").read_text() == "mine"


def test_what_a_killed_writer_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    others = [f".file.md.{STALE}", f".other.md.{STALE}.tmp", ".file.md.tmp", f".file.md.{STALE[:-1]}g.tmp"]
    for name in (*others, f".file.md.{STALE}.tmp"):
        (tmp_path / name).write_text("half")
    output(tmp_path / "file.md").write(MARK)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "file.md"])


def _write_slowly(path: Path, begun: int, go_on: int) -> None:
    with output(path).replaced() as stream:
        stream.write(MARK.encode())
        os.write(begun, b"x")
        os.read(go_on, 1)


def test_the_temporary_file_of_a_living_writer_stays(tmp_path: Path) -> None:
    begun, go_on = os.pipe(), os.pipe()
    writer = get_context("fork").Process(target=_write_slowly, args=(tmp_path / "file.md", begun[1], go_on[0]))
    writer.start()
    os.read(begun[0], 1)
    output(tmp_path / "file.md").write(MARK + "from the other process")
    os.write(go_on[1], b"x")
    writer.join(30)
    assert writer.exitcode == 0
    assert [path.name for path in tmp_path.iterdir()] == ["file.md"]
    assert (tmp_path / "file.md").read_text() == MARK


@pytest.mark.parametrize(
    ("is_ours", "ours", "others"),
    [
        (
            own_files.is_json_with(["a"], 1),
            b'{"format": 1, "a": 0, "b": 0}',
            [b'{"format": 2, "a": 0}', b'{"format": 1}', b"[]", b"{", b"\xff\0", b"[" * 100_000],
        ),
        (
            own_files.is_json_lines_with(["a"]),
            b'{"a": 1}\n{"b"',
            [b'{"a": 1}', b'{"a": 1, "b": 1}\n', b"a poem\n", b"\n", b"\xff\n"],
        ),
        (own_files.is_own_html, b'<head><meta name="generator" content="hdtool 1">', [b"<head>hdtool"]),
        (own_files.is_own_markdown, MARK.encode(), [b"# hdtool", b" " + MARK.encode()]),
        (
            own_files.is_own_png,
            own_files.PNG_MAGIC + b"...." + own_files.PNG_ENTRY,
            [own_files.PNG_MAGIC, own_files.PNG_ENTRY],
        ),
    ],
)
def test_files_are_recognised_by_what_they_hold(
    tmp_path: Path, is_ours: Callable[[Path], bool], ours: bytes, others: list[bytes]
) -> None:
    for content in (ours, *others):
        (tmp_path / "file").write_bytes(content)
        assert is_ours(tmp_path / "file") == (content == ours), content[:40]
