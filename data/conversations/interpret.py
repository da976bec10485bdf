"""The one interpretation of a row: which of the known forms it has, and the conversation in it.

The keys of an object determine its form; ``docs/guides/input-formats.md`` shows all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hdtool.data.conversations import openai_api as api
from hdtool.data.conversations.conversation import (
    ANSWERS,
    ASSISTANT,
    QUESTIONS,
    REQUEST,
    SYSTEM,
    TEXT,
    USER,
    Conversation,
    Turn,
)
from hdtool.data.conversations.messages import content_text, message_text, role_of, turns_in
from hdtool.data.conversations.pairs import pair_in
from hdtool.data.conversations.record_shape import described
from hdtool.data.conversations.recorded_answers import is_collected, with_ids
from hdtool.data.formats.json_rows import is_conversation
from hdtool.data.formats.row import RowError
from hdtool.data.spec_bench import first_choice
from hdtool.data.unicode import lone_surrogate

CONVERSATION_KEYS = ("conversations", "messages", "conversation")
ID_KEYS = ("id", "question_id", "custom_id", "conversation_id")
NO_CONVERSATION = ("embedding", "moderation", "image", "audio")
"""Parts of the URLs of batch requests without a conversation."""
FAILED = 400
"""The first status of a failed request."""


PAGE = "https://hdtool.github.io/hdtool/guides/input-formats/"


class UnknownFormError(RowError):
    """A row has none of the known forms."""

    advice = f"; accepted forms: {PAGE}"


def conversation_of(value: Any) -> Conversation:
    """The conversation in a row; raises a ``RowError`` if there is none."""
    if isinstance(value, RowError):
        raise value
    found = _found(value)
    if not any(turn.ids or not turn.text.isspace() for turn in found.turns if turn.text or turn.ids):
        raise RowError("empty text" if found.kind == TEXT else "empty conversation")
    for turn in found.turns:
        if fault := lone_surrogate(turn.text):
            raise RowError(f"not valid Unicode ({fault})")
    return _named(found, value) if isinstance(value, dict) else found


def _named(found: Conversation, row: dict[str, Any]) -> Conversation:
    name = next((row[key] for key in ID_KEYS if isinstance(row.get(key), str | int)), "")
    category = row.get("category")
    return replace(found, id=str(name), category="" if category is None else str(category), model=_model_of(row))


def _model_of(row: dict[str, Any]) -> str:
    """The model that a row names, or else its request or its response."""
    bodies: list[Any] = [row]
    for key in ("body", *api.REQUEST_KEYS, *api.RESPONSE_KEYS):
        held = row.get(key)
        bodies += [held, held.get("body")] if isinstance(held, dict) else []
    named = (body["model"] for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str))
    return next((name for name in named if name), "")


def _found(value: Any) -> Conversation:
    if isinstance(value, str):
        return Conversation((Turn(ASSISTANT, value),), kind=TEXT)
    if is_conversation(value):
        return Conversation(tuple(turns_in(value, "messages")))
    if not isinstance(value, dict):
        raise RowError(f"a record is an object or a text (found: {type(value).__name__})")
    # A Parquet row has all columns of its file, some of them null.
    row = {key: held for key, held in value.items() if held is not None}
    for form in FORMS:
        if found := form(row):
            return found
    if "error" in row:
        raise RowError("a failed request without its messages")
    raise UnknownFormError(f"no conversation, answer or text in it (found: {described(row)})")


def _batch(row: dict[str, Any]) -> Conversation | None:
    """A line of a batch: its request, or the answer to it."""
    if "custom_id" not in row:
        return None
    key = f"custom_id {row['custom_id']}"
    if isinstance(body := row.get("body", row.get("params")), dict):
        if any(part in str(row.get("url")) for part in NO_CONVERSATION):
            raise RowError(f"a batch request of {row['url']} holds no conversation")
        turns = api.request_turns(body)
        return Conversation(tuple(turns), kind=REQUEST, key=key, prompted=len(turns))
    if isinstance(result := row.get("result"), dict):
        row = {"response": result.get("message"), "error": None if "message" in result else result}
    if "response" not in row and "error" not in row:
        return None
    response = row.get("response")
    answer = [] if row.get("error") or _failed(response) else api.answer_turns(api.body_of(response))
    if not answer:
        raise RowError("a request of the batch that failed")
    return Conversation(tuple(answer), kind=ANSWERS, key=key)


def _spec_bench_answers(row: dict[str, Any]) -> Conversation | None:
    choices = row.get("choices")
    if choices is None or (isinstance(choices, list) and choices and _is_choice(choices[0])):
        return None
    try:
        turns = tuple(Turn(ASSISTANT, text) for text in first_choice(choices)["turns"])
    except ValueError as fault:
        raise RowError(str(fault)) from None
    return Conversation(turns, kind=ANSWERS, key=f"question {row.get('question_id')}")


def _is_choice(choice: Any) -> bool:
    """Whether a choice is one of OpenAI's API."""
    return isinstance(choice, dict) and any(key in choice for key in ("message", "delta", "text"))


def _chat(row: dict[str, Any]) -> Conversation | None:
    key = next((key for key in CONVERSATION_KEYS if key in row), None)
    if key is None:
        return None
    turns = turns_in(row[key], key)
    if turns and turns[0].role != SYSTEM and (system := row.get("system")):
        turns.insert(0, Turn(SYSTEM, content_text(system)))
    if is_collected(row):
        return Conversation(tuple(with_ids(turns, row)), max_new_tokens=row.get("max_new_tokens"))
    answer = None if turns and turns[-1].by_model else _answer(row, structured=True)
    if answer is not None:
        return Conversation((*turns, *answer), prompted=len(turns))
    given = row.get("prompt_messages")
    return Conversation(tuple(turns), prompted=given if isinstance(given, int) and 0 <= given <= len(turns) else 0)


def _exchange(row: dict[str, Any]) -> Conversation | None:
    """A request and its response, or one of them."""
    asked = _request(row)
    answer = _answer(row, structured=asked is not None)
    if asked is None and answer is None:
        return None
    if asked is None and not answer:
        raise RowError("a failed request without its messages")
    asked = asked or []
    return Conversation((*asked, *(answer or ())), prompted=len(asked))


def _request(row: dict[str, Any]) -> list[Turn] | None:
    for key in api.REQUEST_KEYS:
        body = api.body_of(row.get(key))
        if api.is_request(body):
            return api.request_turns(body)
        if isinstance(body, list) and body and all(isinstance(one, dict) for one in body):
            return turns_in(body, key)
    body = api.body_of(row.get("body"))
    if api.is_request(body):
        return api.request_turns(body)
    has_answer = any(_is_structured(row.get(key)) for key in ("choices", *api.RESPONSE_KEYS))
    if "messages" in row or isinstance(row.get("prompt"), list) or (has_answer and api.is_request(row)):
        return api.request_turns(row)
    return None


def _answer(row: dict[str, Any], *, structured: bool) -> list[Turn] | None:
    """The answer in a row; a text is one if ``structured``, that is if the request is in a form of an API."""
    for key in api.RESPONSE_KEYS:
        held = row.get(key)
        if _failed(held):
            return []
        if _is_structured(held):
            return api.answer_turns(api.body_of(held))
        if isinstance(held, str) and structured:
            return api.answer_turns(held)
    if isinstance(row.get("choices"), list) or row.get("object") in ("response", "chat.completion"):
        return api.answer_turns(row)
    return [] if structured and "error" in row else None


def _is_structured(held: Any) -> bool:
    """Whether a value is a response of an API; a text is one if it is the JSON of one."""
    body = api.body_of(held) if not isinstance(held, str) or '"choices"' in held or '"object"' in held else None
    return api.is_response(body)


def _failed(response: Any) -> bool:
    if not isinstance(response, dict):
        return False
    status = response.get("status_code", response.get("status"))
    return isinstance(status, int) and status >= FAILED


def _questions(row: dict[str, Any]) -> Conversation | None:
    turns = row.get("turns")
    if turns is None:
        return None
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
        return Conversation(tuple(turns_in(turns, "turns")))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise RowError("`turns` must be a list of texts, none of them empty")
    key = f"question {row['question_id']}" if "question_id" in row else ""
    return Conversation(tuple(Turn(USER, turn) for turn in turns), kind=QUESTIONS, key=key)


def _single_message(row: dict[str, Any]) -> Conversation | None:
    if "role" not in row or "content" not in row:
        return None
    return Conversation((Turn(role_of(row["role"]), message_text(row)),))


FORMS: tuple[Callable[[dict[str, Any]], Conversation | None], ...] = (
    _batch,
    _spec_bench_answers,
    _chat,
    _exchange,
    _questions,
    _single_message,
    pair_in,
)
"""Each returns None for a row of another form; the first that fits is used."""
