"""Records from files: every format and shape that people have, and every way to get it wrong."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import socket
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from hdtool.data.documents import InputFile
from hdtool.data.errors import RecordError
from hdtool.data.input_files import find_inputs
from hdtool.data.texts_and_traces import Record, RecordReader

SHAREGPT = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
TURNS = ["user", "assistant", "tool", "model"]
Texts = tuple[str, ...]


def write(folder: Path, name: str, content: object, *rows: object) -> Path:
    """A file of bytes or text as they stand, or of JSON Lines."""
    path = folder / name
    lines = content if isinstance(content, bytes | str) else "\n".join(map(json.dumps, (content, *rows)))
    data = lines.encode() if isinstance(lines, str) else lines
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") and not data.startswith(b"\x1f") else data)
    return path


def read(*paths: Path, **options: Any) -> list[Texts]:
    return [record.texts for record in RecordReader(paths, **options)]


def parquet(path: Path, rows: list[Any]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    pytest.importorskip("datasets")
    writer.write_table(arrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("row", "texts", "answers"),
    [
        (SHAREGPT, ("q", "a"), ("a",)),
        (
            {"conversation": [{"role": "Assistant", "content": "a"}, {"role": "human", "content": "x"}]},
            ("a", "x"),
            ("a",),
        ),
        ({"messages": [{"role": role, "content": role} for role in TURNS]}, tuple(TURNS), ("assistant", "model")),
        ({"messages": [{"role": "model", "content": [{"text": "a"}, {"image": 1}, {"text": "b"}]}]}, ("a\nb",), None),
        ({"messages": [{"role": "user", "content": "q"}, {"role": "gpt", "content": None}]}, ("q",), ()),
        ({"conversations": [{"from": "human", "value": "k"}, {"from": "bing", "value": " "}]}, ("k",), ()),
        ({"choices": [{"turns": ["a", "b"]}, {"turns": ["c"]}], "question_id": 1}, ("a", "b"), None),
        ({"output": "a", "prompt": "q"}, ("q", "a"), ("a",)),
        ({"prompt": "q", "text": "a", "tokens": 3}, ("q", "a"), ("a",)),
        ({"instruction": "q", "input": "", "output": "a", "text": "q a"}, ("q", "a"), ("a",)),
        ({"question": "q", "answer": "a"}, ("q", "a"), ("a",)),
        ({"prompt": "q"}, ("q",), ()),
        ({"text": "t", "prompt": None}, ("t",), None),
        ({"content": "t"}, ("t",), None),
        ("t", ("t",), None),
    ],
)
def test_every_known_shape(tmp_path: Path, row: object, texts: Texts, answers: Texts | None) -> None:
    path = write(tmp_path, "a.jsonl", f"{json.dumps(row)}\n{json.dumps(SHAREGPT)}")
    assert read(path) == [texts, ("q", "a")]
    said = texts if answers is None else answers
    assert read(path, answers_only=True) == [answered for answered in (said, ("a",)) if answered]


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("ending", [".json", ".jsonl", ".ndjson", ".JSONL", ".unknown", ""])
def test_every_json_format(tmp_path: Path, ending: str, packed: str) -> None:
    lines = b'\xef\xbb\xbf%b\r\n\n \n"t"\r\n' % json.dumps(SHAREGPT).encode()
    path = write(tmp_path, f"lines{ending}{packed}", lines)
    assert read(path) == [("q", "a"), ("t",)]
    if "l" not in ending.lower() and "nd" not in ending:
        assert read(write(tmp_path, f"array{ending}{packed}", f"\n {json.dumps([SHAREGPT, 't'])}")) == read(path)
        assert read(write(tmp_path, f"one{ending}{packed}", json.dumps(SHAREGPT, indent=1))) == [("q", "a")]


@pytest.mark.parametrize("name", ["a.txt", "a.text", "a.MD", "a.txt.gz", "a.md", "a", "a.log"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path, name, "\ufeffone\n\n{two}\n"), answers_only=True) == [("one\n\n{two}\n",)]


@pytest.mark.parametrize("name", ["a.parquet", "a[1] *.parquet", "unknown", "a.parquet.gz"])
def test_parquet_is_read_without_a_network(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: pytest.fail("a server was called"))
    path = parquet(tmp_path / name, [{**SHAREGPT, "text": None}, {"text": "t"}, {"text": None}] + [{"text": "u"}] * 97)
    if name.endswith(".gz"):
        write(tmp_path, name, path.read_bytes())
    reading = RecordReader([path])
    records = iter(reading)
    assert [next(records).texts for _ in range(3)] == [("q", "a"), ("t",), ("u",)]
    assert 0 < reading.bytes_read < reading.total_bytes
    assert len(list(records)) == 96
    assert reading.bytes_read == reading.total_bytes == path.stat().st_size
    assert reading.tally.messages == [f"{path}[2]: no conversation, answer or text in it (found: nothing)"]
    assert reading.sources == [InputFile(str(path), hashlib.sha256(path.read_bytes()).hexdigest())]


def test_the_files_and_addresses_that_parquet_names_are_not_opened(tmp_path: Path) -> None:
    arrow, writer = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    features = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}}
    rows = [{"text": "t", "image": {"bytes": None, "path": str(tmp_path / "not-an-image")}}]
    image = arrow.struct({"bytes": arrow.binary(), "path": arrow.string()})
    schema = arrow.schema({"text": arrow.string(), "image": image})
    marked = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    writer.write_table(arrow.Table.from_pylist(rows, marked), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [("t",)]


def test_names_folders_and_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ["a.json.gz", "a[1].txt", "b.jsonl", "sub/c.TXT", "sub/deep/d.parquet"]
    for name in (*everything, "x.png", ".hidden.txt", ".git/config.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_inputs(["."]) == [Path(name) for name in everything]
    assert find_inputs(["x.png", "b.jsonl", tmp_path / "b.jsonl", "sub/../x.png"]) == [Path("x.png"), Path("b.jsonl")]
    assert find_inputs(["**/[cd].*", "a[1].txt"]) == [Path(name) for name in (*everything[3:], "a[1].txt")]
    assert find_inputs(["*"]) == [Path(name) for name in (*everything[:3], "x.png")]
    assert find_inputs(["~/b.jsonl"]) == [tmp_path / "b.jsonl"]
    assert find_inputs([]) == []


def test_logs_and_databases_of_a_folder_are_known_by_their_content(tmp_path: Path) -> None:
    """A folder of logs may hold those of other programs."""
    (tmp_path / "requests.log").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    (tmp_path / "system.log").write_text("Nov 22 10:00:00 host kernel: link is up\n")
    (tmp_path / "empty.log").touch()
    for name, table in (("logs.db", "responses (id text)"), ("other.db", "places (url text)")):
        with closing(sqlite3.connect(tmp_path / name)) as database:
            database.execute(f"create table {table}")
    (tmp_path / "cut.db").write_bytes(b"SQLite format 3\0" + bytes(20))
    (tmp_path / "packed.log.gz").write_bytes(b"\x1f\x8bno gzip")
    assert [path.name for path in find_inputs([tmp_path])] == ["logs.db", "requests.log"]
    assert find_inputs([tmp_path / "system.log"]) == [tmp_path / "system.log"], "a file that is named is read"


@pytest.mark.parametrize("pattern", ["none.txt", "*.csv", "", "empty*"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordError, match="matches no file") as error:
        find_inputs([pattern])
    assert str(error.value).startswith(pattern)
    with pytest.raises(RecordError, match=r"empty holds no files to read: name files, or put \.json"):
        find_inputs(["empty"])


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"none.txt does not exist"):
        RecordReader([tmp_path / "none.txt"])
    with pytest.raises(RecordError, match="is a folder"):
        read(tmp_path)
    with pytest.raises(RecordError, match="no text found in no input"):
        read()
    locked = write(tmp_path, "locked.txt", "secret")
    locked.chmod(0)
    if not os.access(locked, os.R_OK):  # root reads everything
        with pytest.raises(RecordError, match="permissions"):
            read(locked)


def test_a_bad_record_is_named_and_reading_goes_on(tmp_path: Path) -> None:
    """The zero byte lies beyond the beginning, by which whole files are judged."""
    path = write(tmp_path, "a.jsonl", b'"%b"\n\n"a\0"\n"b"' % (b"a" * 100_000))
    reading = RecordReader([path], tolerance=0.34)
    assert [record.texts for record in reading] == [("a" * 100_000,), ("b",)]
    assert (reading.tally.good, reading.tally.bad) == (2, 1)
    assert reading.tally.messages == [f"{path}:3: binary data"]


def test_too_many_bad_records_are_an_error_at_the_end(tmp_path: Path) -> None:
    good = write(tmp_path, "good.txt", "text")
    path = write(tmp_path, "bad.json", json.dumps(["a", *[{"x": 1}] * 30, *["a"] * 28]))
    reading = RecordReader([good, path], tolerance=0.5)
    assert [record.source for record in reading] == [0] + [1] * 29
    assert (reading.tally.good, reading.tally.bad, len(reading.tally.messages)) == (30, 30, 20)
    reading = RecordReader([good, path], tolerance=0.49)
    records = iter(reading)
    assert [next(records).source for _ in range(30)][-1] == 1
    with pytest.raises(
        RecordError,
        match=r"^30 of 60 records .* first at .*bad.json\[1\] \(no conv.*raise --max-bad-fraction; accepted forms: .*$",
    ):
        next(records)


def test_no_text_at_all_is_an_error(tmp_path: Path) -> None:
    asked = write(tmp_path, "a.jsonl", {"prompt": "q"})
    assert read(asked) == [("q",)]
    with pytest.raises(RecordError, match=r"no answers of a model found in .*a.jsonl and 1 more"):
        read(asked, asked, answers_only=True)
    with pytest.raises(RecordError, match=r"no text found in .*b.jsonl: name"):
        read(write(tmp_path, "b.jsonl", {"x": 1}), tolerance=1.0)


def test_progress_and_hashes(tmp_path: Path) -> None:
    rows = [{"text": os.urandom(500).hex()} for _ in range(1000)]
    paths = [write(tmp_path, name, rows[0], *rows) for name in ("a.jsonl", "b.jsonl.gz")]
    paths += [write(tmp_path, "c.json", json.dumps(rows)), write(tmp_path, "d.jsonl", '"text"' + "\n" * 100_000)]
    hashes = [InputFile(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]
    reading = RecordReader(paths)
    assert reading.sources == hashes
    reading = RecordReader(paths)
    for _ in range(2):
        seen = [(record.source, reading.bytes_read) for record in reading]
        assert seen == sorted(seen)
        # From Python 3.12 on, gzip reads 128 KiB at a time, of half a megabyte here.
        assert all(len({count for owner, count in seen if owner == source}) > 3 for source in range(3))
        assert reading.bytes_read == reading.total_bytes == sum(path.stat().st_size for path in paths)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_one_long_line(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, {"text": "abcde" * 10_000_000}, {"text": "t"})
    assert list(map(len, (texts[0] for texts in read(path)))) == [50_000_000, 1]


def test_lines_are_read_one_by_one(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "\n".join(['"text"'] * 100_000) + "\n\xff")
    reading = RecordReader([path])
    assert next(iter(reading)) == Record(("text",), 0)
    assert reading.bytes_read < 200_000


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=1, max_size=5))
def test_whatever_json_can_hold_comes_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.getbasetemp()
    lines = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    assert read(write(folder, "all.jsonl.gz", lines)) == [(text,) for text in texts]
    assert read(write(folder, "all.json", json.dumps(texts))) == [(text,) for text in texts]
