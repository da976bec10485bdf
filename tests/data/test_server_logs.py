"""Logs of servers and the database of ``llm``: requests and their answers are put together."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pytest

from hdtool.data.texts_and_traces import RecordReader
from tests.support.logs import ANSWER, ASKED, GOOD, OK, REQUEST, RESPONSES, SECRET, converted, database, said

VLLM = "INFO Received request c-1: prompt: 'What is a list?', params: SamplingParams(n=1), lora_request: None."
LOGS: dict[str, tuple[list[str], list[list[dict[str, str]]], str]] = {
    "an answer without its request": (
        ["Generated response c-9: output: 'A sequence.', output_token_ids: None, finish_reason: stop"],
        [[ANSWER]],
        "",
    ),
    "a request without its answer": ([VLLM], [[ASKED]], ""),
    "a line of vLLM that is cut off": (
        [VLLM, "Received request c-2: prompt: 'What is"],
        [[ASKED]],
        ":2: a line of vLLM's",
    ),
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
        [
            f"DEBUG Request c-1 JSON body: {json.dumps(REQUEST)}",
            VLLM.replace("What", "<template>What"),
            "Generated response c-1: output: 'A sequence.', finish_reason: stop",
        ],
        [[ASKED, ANSWER]],
        "",
    ),
    "deltas of a stream": (
        [
            VLLM,
            "Generated response c-1 (streaming delta): output: 'A', output_token_ids: [1], finish_reason: None",
            "Generated response c-1 (streaming complete): output: 'A sequence.', finish_reason: stop",
        ],
        [[ASKED, ANSWER]],
        "",
    ),
    "a request of llama-server that is cut off": (
        [
            "srv  log_server_r: request:  " + json.dumps(REQUEST),
            "srv  log_server_r: response: " + json.dumps(OK),
            'srv  log_server_r: request:  {"messages":[{"ro',
            "srv  log_server_r: response: {}",
        ],
        [[ASKED, ANSWER]],
        ":4: a request in llama-server's log is not valid JSON",
    ),
    "a failed request of llama-server": (
        [
            "srv  log_server_r: request:  " + json.dumps(REQUEST),
            'srv  log_server_r: response: {"error": {"code": 400}}',
        ],
        [[ASKED]],
        "",
    ),
    "other requests of llama-server": (
        [
            "srv  log_server_r: request: POST /tokenize 127.0.0.1 200",
            'srv  log_server_r: request:  {"content":"a"}',
            'srv  log_server_r: response: {"tokens": [1]}',
            "srv  log_server_r: request:  " + json.dumps(REQUEST),
            "srv  log_server_r: response: " + json.dumps(OK),
        ],
        [[ASKED, ANSWER]],
        "",
    ),
    "JSON among other lines": (
        ["2026-11-22 INFO started", f"2026-11-22 INFO {GOOD}", '2026-11-22 INFO {"event": "stop"}'],
        [[ASKED, ANSWER]],
        "",
    ),
}


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


MESSAGES = (
    "create table turns (id text, tip_message_hash text)",
    "create table messages (hash text primary key, parent_hash text, role text)",
    "create table parts (message_hash text, position integer, type text, text text, payload text)",
    "create table fragments (id integer, content text)",
)


def test_the_message_store_of_llm(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Turns of version 0.36 that share their beginning, beside an exchange of the earlier kind."""
    pieces = json.dumps({"text_ref": [{"fragment": 7}, {"literal": "\nTwo?"}]})
    database(
        RESPONSES,
        "insert into responses values ('t1', 'c', 'twice', null, 'twice', '1')",
        "insert into responses values ('r0', 'c', 'What is a list?', 'Be brief.', 'A sequence.', '0')",
        *MESSAGES,
        "insert into messages values ('m0', null, 'user'), ('m1', 'm0', 'assistant')",
        "insert into messages values ('m2', 'm1', 'user'), ('m3', 'm2', 'assistant'), ('m4', 'm1', 'user')",
        "insert into parts values ('m0', 0, 'text', 'One?', null), ('m1', 2, 'text', '1', null)",
        "insert into parts values ('m1', 0, 'reasoning', 'Hm.', null), ('m1', 1, 'text', 'It is ', null)",
        f"insert into parts values ('m2', 0, 'text', null, '{pieces}'), ('m3', 0, 'text', '2', null)",
        "insert into fragments values (7, 'Count.')",
        "insert into turns values ('t1', 'm1'), ('t2', 'm3')",
    )(path := tmp_path / "logs.db")
    code, rows, _ = converted(path, capfd)
    assert code == 0
    assert [[message["content"] for message in row["messages"]] for row in rows] == [
        ["One?", "It is 1", "Count.\nTwo?", "2"],
        ["Be brief.", "What is a list?", "A sequence."],
    ]
    packed = tmp_path / "logs.db.zst"
    packed.write_bytes(pyarrow.Codec("zstd").compress(path.read_bytes()).to_pybytes())
    assert [row["messages"] for row in converted(packed, capfd)[1]] == [row["messages"] for row in rows]


def test_a_damaged_database_of_llm_is_read_to_its_end(tmp_path: Path) -> None:
    """Messages that are their own ancestors, or whose parts are damaged or missing."""
    database(
        *MESSAGES,
        "insert into messages values ('m0', 'm1', 'user'), ('m1', 'm0', 'assistant'), ('m2', 'm1', 'assistant')",
        "insert into messages values ('m3', null, 'assistant'), ('m4', 'm3', 'user')",
        "insert into parts values ('m0', 0, 'text', 'words', null), ('m1', 0, 'text', 'words', null)",
        "insert into parts values ('m2', 0, 'text', 'words', null), ('m3', 0, 'text', null, '{damaged')",
        "insert into turns values ('t1', 'm2'), ('t2', 'm3'), ('t3', 'm4'), ('t4', 'gone')",
    )(path := tmp_path / "logs.db")
    reading = RecordReader([path], tolerance=1.0)
    assert len(list(reading)) == 1
    assert reading.tally.bad == 2


def test_a_damaged_text_in_a_database_of_llm_is_one_bad_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    payloads = ['{"text_ref": ["words"]}', '{"text_ref": "words"}', '{"text_ref": {"literal": "words"}}']
    database(
        *MESSAGES,
        "insert into messages values ('m0', null, 'user'), ('m1', 'm0', 'assistant')",
        "insert into parts values ('m0', 0, 'text', 'One?', null), ('m1', 0, 'text', '1', null)",
        "insert into messages values ('utf8', 'm0', 'assistant')",
        f"insert into parts values ('utf8', 0, 'text', cast(x'ff' || '{SECRET}' as text), null)",
        *(f"insert into messages values ('{payload}', 'm0', 'assistant')" for payload in payloads),
        *(f"insert into parts values ('{payload}', 0, 'text', null, '{payload}')" for payload in payloads),
        *(f"insert into turns values ('t', '{tip}')" for tip in ("utf8", *payloads, "m1")),
    )(path := tmp_path / "logs.db")
    code, rows, errors = converted(path, capfd, "--max-bad-fraction", "1")
    assert code == 0
    assert [[message["content"] for message in row["messages"]] for row in rows] == [["One?", "1"]]
    left_out = [line for line in errors if line.startswith("left out: ")]
    assert len(left_out) == 4 and all("a conversation with a damaged text (" in line for line in left_out)
    code, _, errors = converted(path, capfd)
    assert code == 1 and "copy it again" not in errors[-1]


def test_a_request_repeats_no_earlier_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each request holds the conversation before it, which earlier requests recorded."""
    first = {"request": REQUEST, "response": OK}
    later = {"request": {"messages": [ASKED, ANSWER, {"role": "user", "content": "And?"}]}, "response": "No more."}
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(first) + "\n" + json.dumps(later))
    assert converted(path, capfd)[0] == 0
    for name in ("log.jsonl", "converted.jsonl"):
        readings = (RecordReader([tmp_path / name], answers_only=only) for only in (True, False))
        answers, everything = ([text for record in reading for text in record.texts] for reading in readings)
        assert answers == ["A sequence.", "No more."]
        assert everything == ["What is a list?", "A sequence.", "And?", "No more."]
