"""Files that are there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from hdtool.data.beside import beside


def test_what_was_written_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "new" / "folder" / "file.json"
    for text in ("first", "second"):
        with beside(place) as path:
            path.write_text(text)
        assert place.read_text() == text
    assert list(place.parent.iterdir()) == [place]


def test_an_error_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    place = tmp_path / "file.json"
    place.write_text("old")
    with pytest.raises(OSError, match="no space"), beside(place) as path:
        path.write_text("half of the n")
        raise OSError("no space left")
    assert place.read_text() == "old"
    assert list(tmp_path.iterdir()) == [place]
