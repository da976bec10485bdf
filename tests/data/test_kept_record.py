"""Records of what was found out once: read only in the same circumstances, and only if they are whole."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hdtool.data.durable_files import CachedValue


def test_a_value_is_read_in_the_same_circumstances_alone(tmp_path: Path) -> None:
    CachedValue(tmp_path / "new", {"torch": "2", "threads": 1}).write({"shapes": [1, 2]})
    assert CachedValue(tmp_path / "new", {"threads": 1, "torch": "2"}).read(dict) == {"shapes": [1, 2]}
    assert CachedValue(tmp_path / "new", {"threads": 2, "torch": "2"}).read(dict) is None


def test_a_foreign_file_at_its_place_is_ignored_and_replaced(tmp_path: Path) -> None:
    one, other = CachedValue(tmp_path, {"threads": 1}), CachedValue(tmp_path, {"threads": 2})
    other.write(2)
    one.path.write_bytes(other.path.read_bytes())
    assert one.read(int) is None
    one.write(1)
    assert (one.read(int), other.read(int)) == (1, 2)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", "7", '{"key": 1}', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_ignored(damage: str, tmp_path: Path) -> None:
    record = CachedValue(tmp_path, {})
    record.write(1)
    record.path.write_text(damage)
    assert record.read(int) is None


def test_a_changed_value_is_ignored(tmp_path: Path) -> None:
    record = CachedValue(tmp_path, {})
    record.write([1, 2])
    row = json.loads(record.path.read_text())
    record.path.write_text(json.dumps({**row, "value": [1, 3]}))
    assert record.read(list) is None


def test_a_value_that_does_not_parse_is_ignored(tmp_path: Path) -> None:
    record = CachedValue(tmp_path, {})
    record.write("seven")
    assert record.read(int) is None


def test_an_old_record_counts_as_none_where_age_matters(tmp_path: Path) -> None:
    record = CachedValue(tmp_path, {})
    record.write(1)
    assert record.read(int, max_age=60) == 1
    os.utime(record.path, (1e9, 1e9))
    assert record.read(int, max_age=60) is None
    assert record.read(int) == 1


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = CachedValue(tmp_path / "file", {})
    record.write(1)
    record.forget()
    assert record.read(int) is None
