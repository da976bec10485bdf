"""Read conversations from logs of llama.cpp's server, vLLM or loggers of JSON, and from the ``llm`` tool's database.

llama.cpp logs carry no request id, so an answer belongs to the earliest unanswered request. The logged body of a
streamed answer is empty, so the answer is joined from its chunks, which have ids. vLLM logs prompts as rendered by the
chat template (``--enable-log-requests``; from 0.11 at level DEBUG) and answers (``--enable-log-outputs``); some
versions of vLLM log the JSON body of a request. Requests and answers are paired, and all other lines are skipped.

``llm`` up to 0.31 has one row of ``responses`` per exchange. Later versions keep ``messages`` as a tree, in which each
message points to its parent, and list the answers in ``turns``.
"""

from __future__ import annotations

import ast
import io
import re
import sqlite3
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from hdtool.data.errors import RecordError
from hdtool.data.row_readers import (
    LOGGER_PREFIX,
    CountedFile,
    FileRow,
    RowError,
    as_file_on_disk,
    decode_utf8,
    line_value,
    parse_json,
)

TEMPLATE_TURNS = (
    # ChatML, Llama 3 and Gemma: start of a turn with its role, text, end of the turn
    re.compile(r"<\|im_start\|>(?P<role>\w+)\n(?P<text>.*?)(?:<\|im_end\|>\n?|\Z)", re.DOTALL),
    re.compile(
        r"(?:<\|begin_of_text\|>)?<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n\n(?P<text>.*?)(?:<\|eot_id\|>|\Z)",
        re.DOTALL,
    ),
    re.compile(r"(?:<bos>)?<start_of_turn>(?P<role>\w+)\n(?P<text>.*?)(?:<end_of_turn>\n?|\Z)", re.DOTALL),
)


def messages_in(prompt: str) -> list[dict[str, str]] | None:
    """Parse a rendered prompt into messages; return None unless a known template matches the whole prompt."""
    for turn in TEMPLATE_TURNS:
        matches = list(turn.finditer(prompt))
        if not matches or "".join(match[0] for match in matches) != prompt:
            continue
        messages = [{"role": match["role"], "content": match["text"]} for match in matches]
        # The last turn is empty if it is the start of the answer.
        return messages[:-1] if not messages[-1]["content"].strip() else messages
    return None


LLAMA_STATUS = re.compile(r"log_server_r\w*: (?:done )?request: (?P<method>[A-Z]+) (?P<path>/\S*)")
LLAMA_REQUEST = re.compile(r"log_server_r\w*: request:\s+(?P<body>\{.*)")
LLAMA_RESPONSE = re.compile(r"log_server_r\w*: response:\s*(?P<body>.*)")
LLAMA_CHUNK = re.compile(r"(?:streamed chunk: |^)data: (?P<body>\{.*)")
GENERATION_PATHS = ("completion", "responses", "messages", "infill")
"""Words in the paths of requests that generate text."""


class LlamaServerLog:
    """Parser that pairs the requests and answers in a log of llama.cpp's server, in the order of the requests."""

    def __init__(self) -> None:
        self._requests: deque[tuple[int, Any]] = deque()
        self._chunks: dict[str, list[Any]] = {}
        self._path = ""

    def is_relevant(self, line: bytes) -> bool:
        return b"log_server_r" in line or b"streamed chunk: " in line or line.startswith(b"data: {")

    def read(self, line: str, number: int) -> Iterator[Any]:
        """Parse a line, and yield the exchange that it completes, if any; a RowError if the exchange is damaged."""
        if status := LLAMA_STATUS.search(line):
            self._path = status["path"]
        elif request := LLAMA_REQUEST.search(line):
            self._requests.append((number, _body(request["body"])))
        elif response := LLAMA_RESPONSE.search(line):
            if self._requests and (exchange := self._exchange(response["body"].strip())):
                yield exchange
        elif streamed := LLAMA_CHUNK.search(line):
            with suppress(RowError):
                chunk = parse_json(streamed["body"])
                self._chunks.setdefault(str(chunk.get("id")), []).append(chunk)

    def unanswered(self) -> Iterator[tuple[int, Any]]:
        """Yield the requests without an answer, each with its line number."""
        for number, request in self._requests:
            yield number, request if isinstance(request, RowError) else {"request": request}

    def _exchange(self, answer: str) -> Any:
        _, request = self._requests.popleft()
        path, self._path = self._path, ""
        if path and not any(part in path for part in GENERATION_PATHS):
            return None
        if isinstance(request, RowError):
            return request
        if not answer and self._chunks:
            return {"request": request, "response": self._chunks.pop(next(iter(self._chunks)))}
        try:
            return {"request": request, "response": parse_json(answer)} if answer else {"request": request}
        except RowError as fault:
            return RowError(f"an answer in llama-server's log is {fault}")


def _body(text: str) -> Any:
    try:
        return parse_json(text)
    except RowError as fault:
        return RowError(f"a request in llama-server's log is {fault}")


PYTHON_STRING = r"(?P<text>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
VLLM_PROMPT = re.compile(
    rf"(?:Received request (?P<id>\S+): |Request (?P<named>\S+) details: )prompt: {PYTHON_STRING}, "
)
VLLM_BODY = re.compile(r"Request (?P<id>\S+) JSON body: (?P<body>\{.*)")
VLLM_ANSWER = re.compile(rf"Generated response (?P<id>\S+?)(?P<stream> \(streaming \w+\))?: output: {PYTHON_STRING}, ")
VLLM_REQUEST_START = re.compile(
    r"(?:Received request \S+: |Request \S+ details: )prompt: ['\"]|Generated response \S.*: output: ['\"]"
)
VLLM_DELTA = " (streaming delta)"


class VllmLog:
    """Parser that pairs the requests and answers in vLLM's log by their ids."""

    def __init__(self) -> None:
        self._requests: dict[str, tuple[int, dict[str, Any]]] = {}

    def is_relevant(self, line: bytes) -> bool:
        return (
            b"Received request " in line
            or b"Generated response " in line
            or b" details: prompt" in line
            or (b" JSON body: {" in line)
        )

    def read(self, line: str, number: int) -> Iterator[Any]:
        """Parse a line, and yield the exchange that it completes, if any; raise RowError if the line is damaged."""
        if body := VLLM_BODY.search(line):
            self._requests[body["id"]] = number, parse_json(body["body"])
        elif prompt := VLLM_PROMPT.search(line):
            if (text := _text(prompt["text"])) and self._find(name := prompt["id"] or prompt["named"]) is None:
                self._requests[name] = number, _request(text)
        elif answer := VLLM_ANSWER.search(line):
            if answer["stream"] != VLLM_DELTA and (text := _text(answer["text"])):
                request = self._requests.pop(self._find(answer["id"]) or "", None)
                yield {"id": answer["id"], "request": request[1] if request else None, "response": text}
        elif VLLM_REQUEST_START.search(line):
            raise RowError("a line of vLLM's log that is cut off")

    def unanswered(self) -> Iterator[tuple[int, Any]]:
        """Yield the requests without an answer, each with its line number."""
        for name, (number, request) in self._requests.items():
            yield number, {"id": name, "request": request}

    def _find(self, name: str) -> str | None:
        """Return the id of the unanswered request to which the prompt or answer called ``name`` belongs, or None.

        vLLM numbers the prompts of a request, and logs the ids of request bodies without their prefix.
        """
        return next(
            (request_id for request_id in (name, f"{name}-0", name.partition("-")[2]) if request_id in self._requests),
            None,
        )


def _text(literal: str) -> str | None:
    try:
        text = ast.literal_eval(literal)
    except (ValueError, SyntaxError) as error:
        raise RowError(f"a line of vLLM's log with a damaged text ({error})") from None
    return text if isinstance(text, str) else None


def _request(prompt: str) -> dict[str, Any]:
    messages = messages_in(prompt)
    return {"prompt": prompt} if messages is None else {"messages": messages}


LOG_MARKERS = re.compile(
    rb"log_server_r|llama_model_loader: |^srv {2}|(?:Received request|Generated response) \S|vLLM API server",
    re.MULTILINE,
)
"""Pattern that identifies a server log by its first lines."""
LOGGED_BODY_KEYS = (
    "messages",
    "conversations",
    "conversation",
    "request",
    "response",
    "body",
    "choices",
    "prompt",
    "input",
)
MAX_LINES_TRIED = 50


def is_server_log(head: bytes) -> bool:
    """Return True if ``head``, the first bytes of a file, comes from a server log."""
    if LOG_MARKERS.search(head):
        return True
    lines = head.splitlines()[:MAX_LINES_TRIED]
    return any(LOGGER_PREFIX.match(line.decode(errors="replace")) and _is_body(line_value(line)) for line in lines)


def log_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    """Yield a row per line with a JSON body, and per exchange a row with ``request``, ``response`` or both.

    Raise RecordError if the log has neither.
    """
    logs = (VllmLog(), LlamaServerLog())
    has_rows = False
    for number, line in enumerate(stream, start=1):
        for value in _values(line, number, logs):
            has_rows = True
            yield FileRow(f":{number}", value, raw.count, number)
    for log in logs:
        for number, value in log.unanswered():
            has_rows = True
            yield FileRow(f":{number}", value, raw.count, number)
    if not has_rows:
        raise RecordError(
            f"{raw.path} is a log without the bodies of requests: start vLLM with --enable-log-requests and "
            "--enable-log-outputs at VLLM_LOGGING_LEVEL=DEBUG, llama-server with --verbose, or name a text file .txt"
        )


def _values(line: bytes, number: int, logs: tuple[VllmLog, LlamaServerLog]) -> Iterator[Any]:
    for log in logs:
        if log.is_relevant(line):
            try:
                yield from log.read(decode_utf8(line), number)
            except RowError as fault:
                yield fault
            return
    if b'{"' in line and _is_body(value := line_value(line)):
        yield value


def _is_body(value: Any) -> bool:
    return isinstance(value, dict) and any(_is_nested(value.get(key)) for key in LOGGED_BODY_KEYS)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict | list) or (isinstance(value, str) and value.lstrip()[:1] in ("{", "["))


SQLITE_MAGIC = b"SQLite format 3\0"
TABLES_OF_TURNS = {"turns", "messages", "parts", "fragments"}
LEAVES_QUERY = """
select id, tip_message_hash from turns where tip_message_hash not in
(select parent_hash from messages where parent_hash is not null) order by rowid
"""
CHAIN_QUERY = """
with recursive chain(hash, parent_hash, role, depth) as (
  select hash, parent_hash, role, 0 from messages where hash = ?
  union all
  select earlier.hash, earlier.parent_hash, earlier.role, depth + 1
  from messages earlier join chain on earlier.hash = chain.parent_hash
  where depth < (select count(*) from messages)
)
select role, (
  select group_concat(coalesce(text, (
    select group_concat(coalesce(
      json_extract(piece.value, '$.literal'),
      (select content from fragments where fragments.id = json_extract(piece.value, '$.fragment'))
    ), '') from json_each(iif(json_valid(payload), payload, '{}'), '$.text_ref') piece
  )), '')
  from (select text, payload from parts where message_hash = chain.hash and type = 'text' order by position)
) from chain order by depth desc
"""
"""Query for the roles and texts of a message and its ancestors. A text may be split into literals and fragments."""
FRAGMENTS_QUERY = """
select content from fragments join {table} on {table}.fragment_id = fragments.id
where {table}.response_id = ? order by {table}."order"
"""


def database_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[FileRow]:
    """Yield a row in chat format for each conversation in ``llm``'s database; other databases raise RecordError."""
    with as_file_on_disk(raw.path, stream) as (file, _):
        try:
            with closing(_opened(file)) as database:
                tables = _tables(database)
                if not _has_answers(tables):
                    raise RecordError(
                        f"{raw.path} is a SQLite database without the tables of llm's logs.db (found: "
                        f"{', '.join(sorted(tables)[:8]) or 'none'}): name the file that `llm logs path` prints"
                    )
                conversations = [*_turns(database, tables), *_responses(database, tables)]
        except sqlite3.Error as error:
            raise RecordError(f"{raw.path} cannot be read as SQLite ({error}): copy it again") from None
    for index, value in enumerate(conversations):
        yield FileRow(f"[{index}]", value, raw.size * (index + 1) // len(conversations), index + 1)


def is_log_of_llm(path: Path) -> bool:
    """Return True if a SQLite file has the tables of the ``llm`` tool."""
    try:
        with closing(_opened(path)) as database:
            return _has_answers(_tables(database))
    except sqlite3.Error:
        return False


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}


def _has_answers(tables: set[str]) -> bool:
    return tables >= TABLES_OF_TURNS or "responses" in tables


def _opened(file: Path) -> sqlite3.Connection:
    uri = file.absolute().as_uri()
    database = sqlite3.connect(f"{uri}?mode=ro", uri=True)
    try:
        database.execute("select 1 from sqlite_master")
    except sqlite3.OperationalError:
        # A database with a write-ahead log cannot be opened normally in a read-only folder.
        database.close()
        database = sqlite3.connect(f"{uri}?immutable=1", uri=True)
    except sqlite3.DatabaseError:
        database.close()
        raise
    database.row_factory = None
    return database


def _turns(database: sqlite3.Connection, tables: set[str]) -> Iterator[Any]:
    if not tables >= TABLES_OF_TURNS:
        return
    for name, tip in database.execute(LEAVES_QUERY).fetchall():
        try:
            chain = database.execute(CHAIN_QUERY, (tip,)).fetchall()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR) != sqlite3.SQLITE_ERROR:
                raise  # the file is locked or its disk fails
            yield RowError("a conversation with a damaged text (not the UTF-8 or the pieces that llm writes)")
        else:
            yield {"id": name, "messages": [{"role": role, "content": text or ""} for role, text in chain]}


def _responses(database: sqlite3.Connection, tables: set[str]) -> Iterator[Any]:
    if "responses" not in tables:
        return
    # Some versions of llm wrote each exchange to the tables of both formats.
    known = {name for (name,) in database.execute("select id from turns")} if "turns" in tables else set()
    conversations: dict[str, list[dict[str, str]]] = {}
    rows = database.execute(
        "select id, conversation_id, prompt, system, response from responses order by datetime_utc, id"
    ).fetchall()
    for name, conversation, prompt, system, response in rows:
        if name in known:
            continue
        messages = conversations.setdefault(conversation or name, [])
        question = _with_fragments(database, tables, "prompt_fragments", name, prompt)
        instructions = _with_fragments(database, tables, "system_fragments", name, system)
        if instructions and all(message != {"role": "system", "content": instructions} for message in messages):
            messages.append({"role": "system", "content": instructions})
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": response or ""})
    for name, messages in conversations.items():
        yield {"id": name, "messages": messages}


def _with_fragments(database: sqlite3.Connection, tables: set[str], table: str, name: str, text: str | None) -> str:
    """Return a prompt or system prompt, preceded by its fragments (texts that ``llm`` stores separately)."""
    texts = []
    if {table, "fragments"} <= tables:
        texts = [content for (content,) in database.execute(FRAGMENTS_QUERY.format(table=table), (name,))]
    return "\n".join(part for part in (*texts, text) if part)
