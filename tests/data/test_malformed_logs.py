"""Malformed and unusual logs: the good records are used, the bad ones are counted and named in a line each."""

from __future__ import annotations

import gzip
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hdtool.cli.app import run
from hdtool.data.conversations.conversation import Conversation
from hdtool.data.conversations.interpret import conversation_of
from hdtool.data.errors import RecordError
from hdtool.data.formats.row import RowError
from hdtool.data.records import Reading

SECRET = "sk-0123456789abcdef"
ASKED = {"role": "user", "content": "What is a list?"}
ANSWER = {"role": "assistant", "content": "A sequence."}
GOOD = json.dumps({"messages": [ASKED, ANSWER]})
REQUEST = {"messages": [ASKED]}
OK = {"choices": [{"message": ANSWER}]}


class Case(NamedTuple):
    """A line between two good ones."""

    name: str
    line: Any
    """Bytes or text as they stand, or a value to be written as JSON."""
    reason: str = ""
    """Why the line is left out; empty if it is used."""
    messages: list[dict[str, str]] | None = None
    """What a line that is used holds, if that is not the usual conversation."""


def said(answer: str, *before: dict[str, str]) -> list[dict[str, str]]:
    return [*before, ASKED, {"role": "assistant", "content": answer}]


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
    Case("parts that are texts", {"messages": [{"role": "user", "content": ["a"]}]}, "a message in parts needs objects"),
    Case("images alone", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "empty conversation"),
    Case("a call of a tool alone", {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "empty conversation"),
    Case("an answer that is a number", {"question": "a", "answer": 4}, "`answer` must be a text (found: int)"),
    Case("no choices", {"choices": []}, "`choices` must begin with an object that has `turns`"),
    Case("choices of an unknown form", {"choices": [{"said": "a"}]}, "`choices` must begin with an object that has"),
    Case("a choice that is a number", {**REQUEST, "choices": [{"message": ANSWER}, 3]}, "`choices` must be a list of obj"),
    Case("an empty turn", {"turns": ["a", ""]}, "`turns` must be a list of texts, none of them empty"),
    # Recorded tokens
    Case("more answers than messages", {"messages": [ASKED], "answers": [{"output_ids": [1]}]}, "`answers` must be a li"),
    Case("a negative token", {"messages": [ASKED, ANSWER], "answers": [{"output_ids": [-1]}]}, "needs `output_ids`"),
    Case(
        "an answer over its limit",
        {"messages": [ASKED, ANSWER], "max_new_tokens": 1, "answers": [{"output_ids": [1, 2], "finish": "stop"}]},
        "an answer is 2 tokens long, and `max_new_tokens` is 1",
    ),
    Case("answers of a data set", {"messages": [ASKED, ANSWER], "answers": {"text": ["a"]}}),
    # Requests and responses
    Case("a failed request alone", {"response": {"error": {"message": SECRET}}}, "a failed request without its messages"),
    Case("an error alone", {"error": SECRET}, "a failed request without its messages"),
    Case("a status of 500", {"response": {"status_code": 500}}, "a failed request without its messages"),
    Case("a failed request", {"request": REQUEST, "response": {"error": {"code": 429}}}, messages=[ASKED]),
    Case("a request for token ids", {"request": {"prompt": [1, 2]}, "response": OK}, "`prompt` is a list of token ids"),
    Case("a request of two texts", {"request": {"prompt": ["a", "b"]}, "response": OK}, "`prompt` is a list of texts"),
    Case("a request without messages", {"request": {"model": "m"}, "n": 1}, "(found: request: object of 1 keys, n: 1)"),
    Case("a request that is cut off", {"request": '{"messages": [{"ro', "response": OK}, "not valid JSON"),
    Case("a request in a text", {"request": json.dumps(REQUEST), "response": json.dumps(OK)}),
    Case("a stream that is cut off", {"request": REQUEST, "response": 'data: {"choices": [{"del'}, "not valid JSON"),
    Case("a stream without its end", {"request": REQUEST, "response": [{"choices": [{"delta": ANSWER}]}]}),
    Case("a refusal", {**REQUEST, "choices": [{"message": {"content": None, "refusal": "No."}}]}, messages=said("No.")),
    Case("two choices", {**REQUEST, "choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]}, messages=said("a")),
    Case("an answer that is JSON", {**REQUEST, "response": '{"city": "Rome"}'}, messages=said('{"city": "Rome"}')),
    Case(
        "the role developer",
        {"request": {"messages": [{"role": "developer", "content": "Be brief."}, ASKED]}, "response": OK},
        messages=said("A sequence.", {"role": "system", "content": "Be brief."}),
    ),
    Case("headers with keys", {"headers": {"x-api-key": SECRET}, "api_key": SECRET, "request": REQUEST, "response": OK}),
    Case("a name and notes", {"messages": [{**ASKED, "name": "Ann"}, {**ANSWER, "reasoning_content": "Hm."}]}),
    Case(
        "a call of a tool",
        {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "tool", "content": "4"}, ANSWER]},
        messages=[ASKED, {"role": "assistant", "content": ""}, {"role": "tool", "content": "4"}, ANSWER],
    ),
    # Batches
    Case("a batch of embeddings", {"custom_id": "1", "url": "/v1/embeddings", "body": {"input": "a"}}, "holds no conver"),
    Case("a batch that failed", {"custom_id": "1", "response": None, "error": {"code": "x"}}, "of the batch that failed"),
    Case("a batch of status 400", {"custom_id": "1", "response": {"status_code": 400, "body": {}}}, "batch that failed"),
    Case("a request of a batch alone", {"custom_id": "1", "body": REQUEST}, messages=[ASKED]),
]  # fmt: skip


def converted(path: Path, capfd: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[Any], list[str]]:
    """The exit code, the rows of the file that ``convert`` wrote, and the lines of standard error."""
    out = path.with_name("converted.jsonl")
    code = run(["convert", str(path), "--out", str(out), "--quiet", *options])
    printed = capfd.readouterr()
    rows = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    assert SECRET not in printed.err + printed.out + json.dumps(rows)
    return code, rows, printed.err.splitlines()


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


def database(*statements: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with closing(sqlite3.connect(path)) as opened:
            opened.executescript(";".join(statements))

    return write


def cut(write: Callable[[Path], None], size: int) -> Callable[[Path], None]:
    def write_part(path: Path) -> None:
        write(path)
        path.write_bytes(path.read_bytes()[:size])

    return write_part


def parquet(path: Path) -> None:
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(pyarrow.Table.from_pylist([{"text": "a"}] * 100), path)


RESPONSES = (
    "create table responses (id text, conversation_id text, prompt text, system text, response text, datetime_utc text)"
)
ZSTD = pyarrow.Codec("zstd").compress(GOOD.encode() * 100).to_pybytes()
VLLM = "INFO [logger.py:39] Received request c-1: prompt: 'What is a list?', params: SamplingParams(n=1), lora_request: None."
FILES: dict[str, tuple[str, bytes | str | Callable[[Path], None], str]] = {
    "empty": ("a.jsonl", "", "is empty"),
    "blank": ("a.log", " \n\n", "is empty"),
    "an empty list": ("a.json", "[]", "is empty"),
    "a list that is cut off": ("a.json", f"[{GOOD}, {GOOD[:20]}", "it may be cut off: fetch it again"),
    "UTF-16": ("a.jsonl", GOOD.encode("utf-16"), "holds binary data"),
    "a picture": ("a.log", b"\x89PNG\r\n\x1a\n\0\0", "holds binary data"),
    "gzip that is cut off": ("a.jsonl.gz", gzip.compress(GOOD.encode())[:-9], "cannot be unpacked"),
    "Zstandard that is cut off": ("a.jsonl.zst", ZSTD[:-3], "cannot be unpacked (Truncated"),
    "no Zstandard": ("a.jsonl.zst", b"\x28\xb5\x2f\xfdno", "cannot be unpacked"),
    "a database of something else": ("a.db", database("create table dogs (name)"), "without the tables of llm's logs.db (f"),
    "a database without answers": ("a.db", database(RESPONSES), "is empty"),
    "a database that is cut off": ("a.db", cut(database(RESPONSES), 60), "cannot be read as SQLite"),
    "Parquet that is cut off": ("a.parquet", cut(parquet, 100), "cannot be read as Parquet"),
    "Arrow that is cut off": ("a.arrow", b"\xff\xff\xff\xff\x10", "cannot be read as Arrow"),
    "a log without bodies": ("a.log", "srv  log_server_r: request: GET /props 127.0.0.1 200\n", "without the bodies of requ"),
    "a log of vLLM at INFO": ("a.log", "Received request c-1: params: SamplingParams(n=1)\n", "without the bodies of requ"),
}  # fmt: skip


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


LLAMA = "srv  log_server_r: done request: POST /v1/chat/completions 127.0.0.1 200\nsrv  log_server_r: request:  {}\n"
LOGS: dict[str, tuple[list[str], list[list[dict[str, str]]], str]] = {
    "an answer without its request": (
        ["Generated response c-9: output: 'A sequence.', output_token_ids: None, finish_reason: stop"],
        [[ANSWER]],
        "",
    ),
    "a request without its answer": ([VLLM], [[ASKED]], ""),
    "a line of vLLM that is cut off": ([VLLM, "Received request c-2: prompt: 'What is"], [[ASKED]], ":2: a line of vLLM's"),
    "answers in another order": (
        [VLLM, VLLM.replace("c-1", "c-2")]
        + [f"Generated response c-{n}: output: 'A sequence.', finish_reason: stop" for n in (2, 1)],
        [[ASKED, ANSWER]] * 2,
        "",
    ),
    "a text with quotes": (
        [VLLM, r"""Generated response c-1: output: "It's a \"list\".\n", finish_reason: stop"""],
        [said('It\'s a "list".\n')],
        "",
    ),
    "the body of a request": (
        [f"DEBUG Request c-1 JSON body: {json.dumps(REQUEST)}", VLLM.replace("What", "<template>What")]
        + ["Generated response c-1: output: 'A sequence.', finish_reason: stop"],
        [[ASKED, ANSWER]],
        "",
    ),
    "deltas of a stream": (
        [VLLM, "Generated response c-1 (streaming delta): output: 'A', output_token_ids: [1], finish_reason: None"]
        + ["Generated response c-1 (streaming complete): output: 'A sequence.', output_token_ids: None, finish_reason: s"],
        [[ASKED, ANSWER]],
        "",
    ),
    "a request of llama-server that is cut off": (
        ["srv  log_server_r: request:  " + json.dumps(REQUEST), "srv  log_server_r: response: " + json.dumps(OK)]
        + ['srv  log_server_r: request:  {"messages":[{"ro', "srv  log_server_r: response: {}"],
        [[ASKED, ANSWER]],
        ":4: a request in llama-server's log is not valid JSON",
    ),
    "a failed request of llama-server": (
        ["srv  log_server_r: request:  " + json.dumps(REQUEST), 'srv  log_server_r: response: {"error": {"code": 400}}'],
        [[ASKED]],
        "",
    ),
    "other requests of llama-server": (
        ["srv  log_server_r: request: POST /tokenize 127.0.0.1 200", 'srv  log_server_r: request:  {"content":"a"}']
        + ['srv  log_server_r: response: {"tokens": [1]}', "srv  log_server_r: request:  " + json.dumps(REQUEST)]
        + ["srv  log_server_r: response: " + json.dumps(OK)],
        [[ASKED, ANSWER]],
        "",
    ),
    "JSON among other lines": (
        ["2026-11-22 INFO started", f"2026-11-22 INFO {GOOD}", '2026-11-22 INFO {"event": "stop"}'],
        [[ASKED, ANSWER]],
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_a_log(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    lines, messages, reason = LOGS[name]
    path = tmp_path / "server.log"
    path.write_text("\n".join(lines))
    code, rows, errors = converted(path, capfd, "--max-bad-fraction", "1")
    assert code == 0
    assert [row["messages"] for row in rows] == messages
    left_out = [line for line in errors if line.startswith("left out: ")]
    assert len(left_out) == bool(reason) and all(reason in line for line in left_out)


def test_the_message_store_of_llm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Turns of version 0.32 that share their beginning, beside an exchange of the earlier kind."""

    def text(words: str) -> str:
        return json.dumps([{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": words}])

    database(
        RESPONSES,
        "insert into responses values ('t1', 'c', 'twice', null, 'twice', '1')",
        "insert into responses values ('r0', 'c', 'What is a list?', 'Be brief.', 'A sequence.', '0')",
        "create table turns (id text, input_node_id text, output_node_id text)",
        "create table messages (id text, role text, parts text)",
        "create table message_nodes (id text, parent_id text, message_id text)",
        *(
            f"insert into messages values ('m{n}', '{role}', '{text(words)}')"
            for n, (role, words) in enumerate(
                [("user", "One?"), ("assistant", "1"), ("user", "Two?"), ("assistant", "2")]
            )
        ),
        "insert into message_nodes values ('n0', null, 'm0'), ('n1', 'n0', 'm1'), ('n2', 'n1', 'm2'), ('n3', 'n2', 'm3')",
        "insert into turns values ('t1', 'n0', 'n1'), ('t2', 'n2', 'n3')",
    )(path := tmp_path / "logs.db")
    code, rows, _ = converted(path, capfd)
    assert code == 0
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        ["One?", "1", "Two?", "2"],
        ["Be brief.", "What is a list?", "A sequence."],
    ]
    packed = tmp_path / "logs.db.zst"
    packed.write_bytes(pyarrow.Codec("zstd").compress(path.read_bytes()).to_pybytes())
    assert [row["messages"] for row in converted(packed, capfd)[1]] == [row["messages"] for row in rows]


def test_a_request_repeats_no_earlier_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each request holds the conversation before it, which earlier requests recorded."""
    first = {"request": REQUEST, "response": OK}
    later = {"request": {"messages": [ASKED, ANSWER, {"role": "user", "content": "And?"}]}, "response": "No more."}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(first) + "\n" + json.dumps(later))
    assert converted(path, capfd)[0] == 0
    for name in ("log.jsonl", "converted.jsonl"):
        readings = (Reading([tmp_path / name], answers_only=only) for only in (True, False))
        answers, everything = ([text for record in reading for text in record.texts] for reading in readings)
        assert answers == ["A sequence.", "No more."]
        assert everything == ["What is a list?", "A sequence.", "And?", "No more."]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "messages conversations request response choices turns role content text prompt input output body error "
                "custom_id message delta type value from answers output_ids system status_code".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(values)
@settings(max_examples=2000, deadline=None)
def test_any_value_is_a_conversation_or_a_reason(value: Any) -> None:
    try:
        found = conversation_of(value)
    except RowError as fault:
        assert str(fault)
        return
    assert isinstance(found, Conversation)
    assert any(turn.text.strip() or turn.ids for turn in found.turns)
    assert all(isinstance(turn.text, str) for turn in found.turns)


@given(st.binary(max_size=300), st.sampled_from(["a.log", "a", "a.jsonl.zst", "a.db", "a.arrow"]), st.integers(0, 4))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_named(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, name: str, start: int
) -> None:
    path = tmp_path_factory.getbasetemp() / name
    starts = (b"", b"SQLite format 3\0", b"\x28\xb5\x2f\xfd", b"\xff\xff\xff\xff", b"srv  log_server_r: request: {")
    path.write_bytes(starts[start] + data)
    try:
        assert list(Reading([path]))
    except RecordError as error:
        assert str(path) in str(error)
