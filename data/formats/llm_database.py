"""Conversations of ``logs.db``, the SQLite database in which the command ``llm`` keeps what it was asked.

Up to version 0.31 each exchange is a row of ``responses``, and the exchanges of a conversation share its id. Later
versions keep messages as a tree: ``message_nodes`` point to their parents, and ``turns`` to the node of each answer.
"""

from __future__ import annotations

import io
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from hdtool.data.errors import RecordError
from hdtool.data.formats.row import CountedFile, Row, RowError
from hdtool.data.formats.tables import on_disk

SQLITE = b"SQLite format 3\0"
LEAVES = """
select turns.id, output_node_id from turns where output_node_id not in
(select parent_id from message_nodes where parent_id is not null) order by turns.rowid
"""
CHAIN = """
with recursive chain(id, parent_id, message_id, depth) as (
  select id, parent_id, message_id, 0 from message_nodes where id = ?
  union all
  select node.id, node.parent_id, node.message_id, depth + 1
  from message_nodes node join chain on node.id = chain.parent_id
)
select messages.role, messages.parts from chain join messages on messages.id = chain.message_id order by depth desc
"""
FRAGMENTS = """
select content from fragments join {table} on {table}.fragment_id = fragments.id
where {table}.response_id = ? order by {table}."order"
"""


def database_rows(raw: CountedFile, stream: io.BufferedReader) -> Iterator[Row]:
    """A row for each conversation, in the chat format."""
    with on_disk(raw.path, stream) as (file, _):
        try:
            with closing(_opened(file)) as database:
                tables = _tables(database)
                if not _has_answers(tables):
                    raise RecordError(
                        f"{raw.path} is a SQLite database without the tables of llm's logs.db (found: "
                        f"{', '.join(sorted(tables)[:8]) or 'none'}): name the file that `llm logs path` prints"
                    )
                found = [*_turns(database, tables), *_responses(database, tables)]
        except sqlite3.Error as error:
            raise RecordError(f"{raw.path} cannot be read as SQLite ({error}): copy it again") from None
    for index, value in enumerate(found):
        yield Row(f"[{index}]", value, raw.size * (index + 1) // len(found), index + 1)


def is_log_of_llm(path: Path) -> bool:
    """Whether a SQLite file has the tables of ``llm``."""
    try:
        with closing(_opened(path)) as database:
            return _has_answers(_tables(database))
    except sqlite3.Error:
        return False


def _tables(database: sqlite3.Connection) -> set[str]:
    return {name for (name,) in database.execute("select name from sqlite_master where type = 'table'")}


def _has_answers(tables: set[str]) -> bool:
    return {"turns", "message_nodes"} <= tables or "responses" in tables


def _opened(file: Path) -> sqlite3.Connection:
    place = file.absolute().as_uri()
    database = sqlite3.connect(f"{place}?mode=ro", uri=True)
    try:
        database.execute("select 1 from sqlite_master")
    except sqlite3.OperationalError:
        # A database with a write-ahead log cannot be opened in a folder that is read-only.
        database.close()
        database = sqlite3.connect(f"{place}?immutable=1", uri=True)
    except sqlite3.DatabaseError:
        database.close()
        raise
    database.row_factory = None
    return database


def _turns(database: sqlite3.Connection, tables: set[str]) -> Iterator[Any]:
    if not {"turns", "message_nodes", "messages"} <= tables:
        return
    for name, node in database.execute(LEAVES).fetchall():
        try:
            messages = [_message(role, parts) for role, parts in database.execute(CHAIN, (node,))]
        except ValueError as fault:
            yield RowError(f"the parts of a message are no JSON ({fault})")
            continue
        yield {"id": name, "messages": messages}


def _message(role: str, parts: str) -> dict[str, Any]:
    held = json.loads(parts)
    texts = [part.get("text") for part in held if isinstance(part, dict) and part.get("type") == "text"]
    return {"role": role, "content": "".join(text for text in texts if text)}


def _responses(database: sqlite3.Connection, tables: set[str]) -> Iterator[Any]:
    if "responses" not in tables:
        return
    # Some versions wrote an exchange to both kinds of tables.
    known = {name for (name,) in database.execute("select id from turns")} if "turns" in tables else set()
    conversations: dict[str, list[dict[str, str]]] = {}
    rows = database.execute(
        "select id, conversation_id, prompt, system, response from responses order by datetime_utc, id"
    ).fetchall()
    for name, conversation, prompt, system, response in rows:
        if name in known:
            continue
        messages = conversations.setdefault(conversation or name, [])
        asked = _with_fragments(database, tables, "prompt_fragments", name, prompt)
        instructions = _with_fragments(database, tables, "system_fragments", name, system)
        if instructions and all(message != {"role": "system", "content": instructions} for message in messages):
            messages.append({"role": "system", "content": instructions})
        messages.append({"role": "user", "content": asked})
        messages.append({"role": "assistant", "content": response or ""})
    for name, messages in conversations.items():
        yield {"id": name, "messages": messages}


def _with_fragments(database: sqlite3.Connection, tables: set[str], table: str, name: str, text: str | None) -> str:
    """A prompt after the fragments that were put before it."""
    texts = []
    if {table, "fragments"} <= tables:
        texts = [content for (content,) in database.execute(FRAGMENTS.format(table=table), (name,))]
    return "\n".join(part for part in (*texts, text) if part)
