"""A conversation in a file: one line of chat JSONL, which the builders of stores read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from hdtool.data.conversations.messages import turns_in
from hdtool.data.errors import PromptError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import json_object
from hdtool.data.formats.row import RowError
from hdtool.data.inputs import faults_named
from hdtool.data.prompts import Message

WRITER = {"saved_by": "hdtool chat"}


def write_chat(path: Path, model: str, messages: Sequence[Message], own: set[Path]) -> None:
    """Write a conversation; a file that is there is replaced only if it is in ``own``, to which the file is added."""

    def is_ours(place: Path) -> bool:
        return place.resolve() in own and json_object(place).get("saved_by") == WRITER["saved_by"]

    advice = "choose another name, or move it away"
    file = OutputFile(path, "a conversation that was saved or loaded since the start", is_ours, PromptError, advice)
    file.write(json.dumps({**WRITER, "model": model, "messages": messages}, ensure_ascii=False) + "\n")
    own.add(path.resolve())


def read_chat(path: Path) -> list[Message]:
    """The messages of a conversation; raises if the file holds none, or several."""
    with faults_named(path, PromptError):
        row = json_object(path)
    if "messages" not in row:
        raise PromptError(f"{path} is not one conversation with messages: name a file that /save wrote")
    try:
        turns = turns_in(row["messages"], "messages")
    except RowError as fault:
        raise PromptError(f"{path}: {fault}: correct it, or name a file that /save wrote") from None
    if not turns:
        raise PromptError(f"{path} holds no messages: name a file that /save wrote")
    return [{"role": turn.role, "content": turn.text} for turn in turns]
