"""Malformed and unusual logs: the good records are used, the bad ones are counted and named in a line each."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest
from hypothesis import given, settings, strategies as st

from hdtool.data.conversation import Conversation
from hdtool.data.conversation_shapes import conversation_of
from hdtool.data.errors import RecordError
from hdtool.data.row_readers import RowError
from hdtool.data.texts_and_traces import RecordReader
from tests.support.logs import ANSWER, ASKED, GOOD, OK, REQUEST, RESPONSES, SECRET, converted, database, said

RESULT = {"role": "tool", "content": "4"}


class Case(NamedTuple):
    """A line between two good ones."""

    name: str
    line: Any
    """Bytes or text as they stand, or a value to be written as JSON."""
    reason: str = ""
    """Why the line is left out; empty if it is used."""
    messages: list[dict[str, str]] | None = None
    """What a line that is used holds, if that is not the usual conversation."""


LINES = [
    # JSON
    Case("a line that is cut off", GOOD[:40], "not valid JSON"),
    Case("a comma after the line", GOOD + ",", "not valid JSON (Extra data"),
    Case("Python's quotes", "{'messages': []}", "not valid JSON"),
    Case("two objects on a line", GOOD + GOOD, "not valid JSON (Extra data"),
    Case("the start of an array", "[", "not valid JSON"),
    Case("a byte of Latin-1", b'{"text": "caf\xe9"}', "not UTF-8 text (byte 0xe9)"),
    Case("half a surrogate pair", r'{"text": "\ud83d"}', "not valid Unicode (U+D83D at character 0)"),
    Case("a deep nesting", "[" * 100_000, "nested too deeply"),
    Case("a number without end", '{"text": ' + "1" * 5000 + "}", "not valid JSON (Exceeds the limit"),
    Case("a number", "17", "a record is an object or a text (found: int)"),
    Case("null", "null", "a record is an object or a text (found: NoneType)"),
    Case("a list of numbers", [1, 2], "a record is an object or a text (found: list)"),
    Case("a duplicate key", '{"messages": [], ' + GOOD[1:]),
    Case("NaN beside the messages", '{"score": NaN, ' + GOOD[1:]),
    Case("a carriage return", GOOD + "\r"),
    Case("a byte order mark", b"\xef\xbb\xbf" + GOOD.encode()),
    Case("a prefix with a time", f"[2026-11-22 10:00:00] INFO {GOOD}"),
    Case("a prefix before broken JSON", f"INFO {GOOD[:-2]}", "not valid JSON"),
    Case("a prefix without JSON", "INFO started", "not valid JSON"),
    # Forms
    Case("an empty object", {}, "no conversation, answer or text in it (found: nothing)"),
    Case("unknown keys", {"frage": "Was?", "n": 3}, 'text in it (found: frage: "Was?", n: 3)'),
    Case("an unknown form with a key", {"api_key": SECRET, "q": SECRET}, "(found: api_key: hidden, q: text of 19 ch"),
    Case("a line break in a key", '{"a\\nb": 1, "id": 2}', "answer or text in it (found: a b: 1, id: 2)"),
    Case("an empty text", '""', "empty text"),
    Case("a prompt that is a number", {"prompt": 3}, "`prompt` must be a text (found: int)"),
    Case("null in all columns", {"messages": None, "text": None}, "(found: nothing)"),
    Case("messages as a text", {"messages": "hi"}, "`messages` must be a list (found: str)"),
    Case("messages as an object", {"messages": {}}, "`messages` must be a list (found: dict)"),
    Case("no messages", {"messages": []}, "empty conversation"),
    Case("blank messages", {"messages": [{"role": "user", "content": " \n"}]}, "empty conversation"),
    Case("messages that are texts", {"messages": ["hi"]}, "a turn needs a role and a text"),
    Case("a message without a role", {"messages": [{"content": "hi"}]}, "a turn needs a role and a text"),
    Case("a message without a text", {"messages": [{"role": "user"}]}, "a turn needs a role and a text"),
    Case("an unknown role", {"messages": [{"role": "agent", "content": "hi"}]}, "unknown role 'agent': expected one"),
    Case("a content that is a number", {"messages": [{"role": "user", "content": 3}]}, "a turn's text must be a text"),
    Case("parts that are texts", {"messages": [{"role": "user", "content": ["a"]}]}, "a message in parts needs ob"),
    Case("images alone", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "empty conversation"),
    Case("a call of a tool alone", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "empty conversation"),
    Case("an answer that is a number", {"question": "a", "answer": 4}, "`answer` must be a text (found: int)"),
    Case("no choices", {"choices": []}, "`choices` must begin with an object that has `turns`"),
    Case("choices of an unknown form", {"choices": [{"said": "a"}]}, "`choices` must begin with an object that has"),
    Case("a turn that is a number", {"choices": [{"turns": [1]}]}, "has `turns`, a list of texts"),
    Case("a choice that is a number", {**REQUEST, "choices": [{"message": ANSWER}, 3]}, "`choices` must be a list"),
    Case("no turns", {"turns": []}, "`turns` must be a list of texts"),
    Case("an empty turn", {"turns": ["a", ""]}, "`turns` must be a list of texts, none of them empty"),
    # Recorded tokens
    Case("more answers than messages", {"messages": [ASKED], "answers": [{"output_ids": [1]}]}, "`answers` must be"),
    Case("no answers", {"messages": [ASKED, ANSWER], "max_new_tokens": 9, "answers": []}, "`answers` must be"),
    Case("an answer without tokens", {"messages": [ASKED, ANSWER], "answers": [{"output_ids": []}]}, "`output_ids`"),
    Case("a token that is true", {"messages": [ASKED, ANSWER], "answers": [{"output_ids": [True]}]}, "`output_ids`"),
    Case("a limit in words", {"messages": [ASKED, ANSWER], "answers": [{}], "max_new_tokens": "9"}, "must be a number"),
    Case("a negative token", {"messages": [ASKED, ANSWER], "answers": [{"output_ids": [-1]}]}, "needs `output_ids`"),
    Case(
        "an answer over its limit",
        {"messages": [ASKED, ANSWER], "max_new_tokens": 1, "answers": [{"output_ids": [1, 2], "finish": "stop"}]},
        "an answer is 2 tokens long, and `max_new_tokens` is 1",
    ),
    Case("answers of a data set", {"messages": [ASKED, ANSWER], "answers": {"text": ["a"]}}),
    # Requests and responses
    Case("a failed request alone", {"response": {"error": {"message": SECRET}}}, "a failed request without"),
    Case("an error alone", {"error": SECRET}, "a failed request without"),
    Case("a status of 500", {"response": {"status_code": 500}}, "a failed request without"),
    Case("a failed request", {"request": REQUEST, "response": {"error": {"code": 429}}}, messages=[ASKED]),
    Case("a request for token ids", {"request": {"prompt": [1, 2]}, "response": OK}, "`prompt` is a list of token ids"),
    Case("a request of two texts", {"request": {"prompt": ["a", "b"]}, "response": OK}, "`prompt` is a list of texts"),
    Case("a request without messages", {"request": {"model": "m"}, "n": 1}, "(found: request: object of 1 keys, n: 1)"),
    Case("a request that is cut off", {"request": '{"messages": [{"ro', "response": OK}, "not valid JSON"),
    Case("a request in a text", {"request": json.dumps(REQUEST), "response": json.dumps(OK)}),
    Case("a stream that is cut off", {"request": REQUEST, "response": 'data: {"choices": [{"del'}, "not valid JSON"),
    Case("a stream without its end", {"request": REQUEST, "response": [{"choices": [{"delta": ANSWER}]}]}),
    Case("a refusal", {**REQUEST, "choices": [{"message": {"content": None, "refusal": "No."}}]}, messages=said("No.")),
    Case("two choices", {**REQUEST, "choices": [{"index": 1, "text": "b"}, {"text": "a"}]}, messages=said("a")),
    Case("an answer that is JSON", {**REQUEST, "response": '{"city": "Rome"}'}, messages=said('{"city": "Rome"}')),
    Case(
        "the role developer",
        {"request": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]}, "response": OK},
        messages=said("A sequence.", {"role": "system", "content": "Be brief."}),
    ),
    Case("headers", {"headers": {"x-api-key": SECRET}, "api_key": SECRET, "request": REQUEST, "response": OK}),
    Case("a name and notes", {"messages": [{**ASKED, "name": "Ann"}, {**ANSWER, "reasoning_content": "Hm."}]}),
    Case(
        "a call of a tool",
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}, RESULT, ANSWER]},
        messages=[ASKED, {"role": "assistant", "content": ""}, RESULT, ANSWER],
    ),
    # Batches
    Case("a batch of embeddings", {"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "a"}}, "holds no"),
    Case("a batch that failed", {"custom_id": "1", "response": None, "error": {"code": "x"}}, "batch that failed"),
    Case("a batch of status 400", {"custom_id": "1", "response": {"status_code": 400}}, "batch that failed"),
    Case("a request of a batch alone", {"custom_id": "1", "body": REQUEST}, messages=[ASKED]),
]


@pytest.mark.parametrize("case", LINES, ids=lambda case: case.name)
def test_a_line_between_good_ones(case: Case, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = case.line if isinstance(case.line, str | bytes) else json.dumps(case.line)
    raw = line if isinstance(line, bytes) else line.encode()
    path = tmp_path / "log.jsonl"
    path.write_bytes(GOOD.encode() + b"\n" + raw + b"\n" + GOOD.encode())
    code, rows, errors = converted(path, capfd, "--max-bad-fraction", "0.34")
    assert code == 0
    wanted = [] if case.reason else [case.messages or [ASKED, ANSWER]]
    assert sorted(map(str, (row["messages"] for row in rows))) == sorted(map(str, [[ASKED, ANSWER]] * 2 + wanted))
    left_out = [line for line in errors if line.startswith("left out: ")]
    assert len(left_out) == bool(case.reason)
    for line in left_out:
        assert line.startswith(f"left out: {path}:2: ") and case.reason in line
    if case.reason:
        code, _, errors = converted(path, capfd)
        assert (code, len(errors)) == (1, 1)
        assert errors[0].startswith(f"error: 1 of 3 records cannot be used, the first at {path}:2 (")


def cut(write: Callable[[Path], None], size: int) -> Callable[[Path], None]:
    def write_part(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[:size])

    return write_part


def parquet(path: Path) -> None:
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist([{"text": "a"}] * 100), path)


ZSTD = pyarrow.Codec("zstd").compress(GOOD.encode() * 100).to_pybytes()
FILES: dict[str, tuple[str, bytes | str | Callable[[Path], None], str]] = {
    "empty": ("a.jsonl", "", "is empty"),
    "blank": ("a.log", " \n\n", "is empty"),
    "an empty list": ("a.json", "[]", "is empty"),
    "a text that is blank": ("a.txt", "\n \n", "is empty"),
    "a text of Latin-1": ("a.txt", b"caf\xe9", "not UTF-8 text (byte 0xe9)"),
    "a zero byte far inside": ("a.txt", b"x" * 100_000 + b"\0", "is binary data"),
    "a value that is cut off": ("a.json", '{"text":\n "a"', "it may be cut off"),
    "a list of Latin-1": ("a.json", b'["caf\xe9"]', "not UTF-8"),
    "a deep nesting": ("a.json", "[" * 100_000, "nested too deeply"),
    "a list that is cut off": ("a.json", f"[{GOOD}, {GOOD[:20]}", "it may be cut off: fetch it again"),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), "holds binary data"),
    "a picture": ("a.log", b"\x89PNG\r\n\x1a\n\0\0", "holds binary data"),
    "gzip that is cut off": ("a.jsonl.gz", gzip.compress(GOOD.encode())[:-9], "cannot be unpacked"),
    "gzip that was changed": (
        "a.txt.gz",
        gzip.compress(b"text")[:-6] + b"xxxxxx",
        "be unpacked (CRC check failed",
    ),
    "no gzip": ("a.gz", b"\x1f\x8bnot gzip", "cannot be unpacked"),
    "Zstandard that is cut off": ("a.jsonl.zst", ZSTD[:-3], "cannot be unpacked (Truncated"),
    "no Zstandard": ("a.jsonl.zst", b"\x28\xb5\x2f\xfdno", "cannot be unpacked"),
    "a database of something else": ("a.db", database("create table dogs (name)"), "without the tables of llm"),
    "a database without answers": ("a.db", database(RESPONSES), "is empty"),
    "a database that is cut off": ("a.db", cut(database(RESPONSES), 60), "cannot be read as SQLite"),
    "Parquet that is cut off": ("a.parquet", cut(parquet, 100), "cannot be read as Parquet"),
    "Arrow that is cut off": ("a.arrow", b"\xff\xff\xff\xff\x10", "cannot be read as Arrow"),
    "a log without bodies": ("a.log", "srv  log_server_r: request: GET /props 127.0.0.1 200\n", "without the bodies"),
    "a log of vLLM at INFO": ("a.log", "Received request c-1: params: SamplingParams(n=1)\n", "without the bodies"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_used(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file, content, reason = FILES[name]
    path = tmp_path / file
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    code, rows, errors = converted(path, capfd, "--max-bad-fraction", "1")
    assert (code, rows, len(errors)) == (1, [], 1)
    assert errors[0].startswith(f"error: {path} ") and reason in errors[0]


def test_files_that_cannot_be_used_are_named_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They count by their bytes: at a tenth of them, the others are used."""
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n" * 20)
    for number in range(7):
        (tmp_path / f"bad{number}.txt").write_bytes(b"caf\xe9")
    code, rows, errors = converted(tmp_path, capfd, "--max-bad-fraction", "0.01")
    assert (code, rows, len(errors)) == (1, [], 1)
    reason = "is not UTF-8 text (byte 0xe9)"
    named = "; ".join(f"{tmp_path}/bad{number}.txt {reason}" for number in range(5))
    assert errors[0].startswith(f"error: 7 of 8 files cannot be read, 1.2% of the bytes ({named}; …): ")
    code, rows, errors = converted(tmp_path, capfd, "--max-bad-fraction", "0.1")
    assert (code, len(rows)) == (0, 20)
    assert [line for line in errors if line.startswith("left out: ") and reason in line] == errors and len(errors) == 7


def test_the_start_of_a_file_that_is_cut_off_is_used(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.jsonl").write_text(f"{GOOD}\n" * 20)
    lines = b"".join(f'{{"text": "{number} {number * 17 % 89}"}}\n'.encode() for number in range(50_000))
    whole = gzip.compress(lines)
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    code, rows, errors = converted(tmp_path, capfd, "--max-bad-fraction", "1")
    assert code == 0 and len(rows) > 1000
    assert errors == [line for line in errors if "cannot be unpacked" in line]


KEYS = [
    "messages",
    "conversations",
    "request",
    "response",
    "choices",
    "turns",
    "role",
    "content",
    "text",
    "prompt",
    "input",
    "output",
    "body",
    "error",
    "custom_id",
    "message",
    "delta",
    "type",
    "value",
    "from",
    "answers",
    "output_ids",
    "system",
    "status_code",
]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=200, deadline=None)
def test_any_value_is_a_conversation_or_a_reason(value: Any) -> None:
    try:
        found = conversation_of(value)
    except RowError as fault:
        assert str(fault)
        return
    assert isinstance(found, Conversation)
    assert any(turn.text.strip() or turn.ids for turn in found.turns)
    assert all(isinstance(turn.text, str) for turn in found.turns)


NAMES = ["a.log", "a", "a.jsonl.zst", "a.db", "a.arrow", "a.json", "a.jsonl", "a.txt", "a.gz"]


@given(st.binary(max_size=300), st.sampled_from(NAMES), st.integers(0, 4))
@settings(max_examples=250, deadline=None)
def test_any_bytes_are_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, start: int
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    starts = (b"", b"SQLite format 3\0", b"\x28\xb5\x2f\xfd", b"\xff\xff\xff\xff", b"srv  log_server_r: request: {")
    path.write_bytes(starts[start] + data)
    try:
        assert list(RecordReader([path]))
    except RecordError as error:
        assert str(path) in str(error)
