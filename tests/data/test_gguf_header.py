"""Headers of GGUF files: what is read, and a clear error for every damaged one."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from hypothesis import given, settings, strategies as st

from hdtool.data import gguf_header
from hdtool.data.errors import ModelError
from hdtool.data.gguf_header import GGUFHeader

BLOCKS = {0: (1, 4), 2: (32, 18)}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def setting(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


SETTINGS = (
    setting("general.architecture", 8, text("llama")),
    setting("general.alignment", 4, struct.pack("<I", 64)),
    setting("llama.rope.freq_base", 6, struct.pack("<f", 500_000.0)),
    setting("llama.flag", 7, b"\1"),
    setting("llama.few", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
    setting("llama.many", 9, struct.pack("<IQ", 0, 500) + bytes(500)),
    setting("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 2) + text("a") + text("é")),
)
TABLE = (
    text("norm") + struct.pack("<IQIQ", 1, 8, 0, 0),
    text("matrix") + struct.pack("<IQQIQ", 2, 64, 4, 2, 64),
)
HEADER = b"GGUF" + struct.pack("<IQQ", 3, len(TABLE), len(SETTINGS)) + b"".join(SETTINGS + TABLE)
DATA = -(-len(HEADER) // 64) * 64
WHOLE = HEADER + bytes(DATA - len(HEADER) + 64 + 8 * 18)


def read(path: Path, content: bytes) -> GGUFHeader:
    path.write_bytes(content)
    gguf_header._read.cache_clear()  # two files of equal size may be written in one tick of the file system's clock
    found = GGUFHeader.read(path)
    found.check_whole(path, BLOCKS)
    return found


def test_settings_and_tensors(tmp_path: Path) -> None:
    found = read(tmp_path / "a.gguf", WHOLE)
    assert found.architecture == "llama"
    assert found.values["llama.rope.freq_base"] == 500_000.0
    assert found.values["llama.flag"] is True
    assert found.values["llama.few"] == [1, -2, 3]
    assert (found.values["llama.many"], found.values["tokenizer.ggml.tokens"]) == (500, 2)
    assert [(one.name, one.numbers, one.kind, one.offset) for one in found.tensors] == [
        ("norm", 8, 0, 0),
        ("matrix", 256, 2, 64),
    ]
    theirs: Any = GGUFReader(tmp_path / "a.gguf")
    assert found.data == theirs.data_offset == DATA


def test_a_header_is_read_once_until_the_file_changes(tmp_path: Path) -> None:
    found = read(path := tmp_path / "a.gguf", WHOLE)
    assert GGUFHeader.read(path) is found
    path.write_bytes(WHOLE.replace(b"norm", b"bias") + bytes(64))
    assert [one.name for one in GGUFHeader.read(path).tensors] == ["bias", "matrix"]


@pytest.mark.parametrize("length", range(0, len(WHOLE), 7))
def test_a_part_of_a_file_is_refused(length: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"is empty|not in GGUF format|ends within its header|is cut short"):
        read(tmp_path / "a.gguf", WHOLE[:length])


def test_an_unknown_format_of_numbers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="holds norm in format 99, which the library gguf lacks"):
        read(tmp_path / "a.gguf", WHOLE.replace(struct.pack("<IQIQ", 1, 8, 0, 0), struct.pack("<IQIQ", 1, 8, 99, 0)))


def test_arrays_without_end_are_refused(tmp_path: Path) -> None:
    nested = setting("deep", 9, struct.pack("<IQ", 9, 1) * 2000)
    with pytest.raises(ModelError, match="its header is damaged"):
        read(tmp_path / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)


@settings(max_examples=150)
@given(st.integers(4, len(HEADER) - 1), st.binary(min_size=1, max_size=9))
def test_damage_is_an_error_of_one_line_or_unseen(tmp_path_factory: Any, place: int, bytes_there: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    try:
        read(path, (WHOLE[:place] + bytes_there + WHOLE[place + len(bytes_there) :])[: len(WHOLE)])
    except ModelError as error:
        assert "\n" not in str(error)
