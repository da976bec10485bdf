"""Parse a row of any known format into a conversation.

The keys of an object determine its format; ``docs/guides/input-formats.md`` lists all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hdtool.data import conversation as api
from hdtool.data.answered_questions import first_choice
from hdtool.data.conversation import (
    ANSWERS,
    ASSISTANT,
    QUESTIONS,
    STOPPED,
    SYSTEM,
    TEXT,
    USER,
    Conversation,
    RecordedRankings,
    Turn,
    content_text,
    message_text,
    message_turns,
    required_text,
    role_of,
)
from hdtool.data.errors import lone_surrogate
from hdtool.data.redacted_records import redacted_record
from hdtool.data.row_readers import RowError, is_conversation

SYSTEM_PROMPT_KEYS = ("system", "system_prompt")
PROMPT_KEYS = ("instruction", "input", "prompt", "question")
ANSWER_KEYS = ("output", "answer", "response", "completion")
DOCUMENT_KEYS = ("text", "content")


def prompt_answer_pair(row: dict[str, Any]) -> Conversation | None:
    """Parse a row that holds a prompt, an answer or both, or one that holds only text; return None for other rows."""
    prompt_keys = [key for key in PROMPT_KEYS if key in row]
    # In a row with an answer, `text` usually repeats the prompt and the answer.
    answers = [key for key in ANSWER_KEYS if key in row] or [key for key in DOCUMENT_KEYS if key in row][:1]
    if not prompt_keys and not answers:
        return None
    if not prompt_keys and answers[0] in DOCUMENT_KEYS:
        return Conversation((Turn(ASSISTANT, _text(row, answers[0])),), kind=TEXT)
    turns = [Turn(SYSTEM, _text(row, key)) for key in SYSTEM_PROMPT_KEYS if isinstance(row.get(key), str)][:1]
    prompt = "\n\n".join(text for key in prompt_keys if (text := _text(row, key)).strip())
    if prompt_keys:
        turns.append(Turn(USER, prompt))
    turns += [Turn(ASSISTANT, _text(row, key)) for key in answers]
    return Conversation(tuple(turns))


def _text(row: dict[str, Any], key: str) -> str:
    return required_text(row[key], f"`{key}`")


def is_collected(row: dict[str, Any]) -> bool:
    """Return True if ``hdtool collect`` wrote the ``answers`` of a row. Some data sets use this key for other data."""
    answers = row.get("answers")
    ids = isinstance(answers, list) and any(isinstance(answer, dict) and "output_ids" in answer for answer in answers)
    return ids or ("answers" in row and "max_new_tokens" in row)


def with_ids(turns: Sequence[Turn], row: dict[str, Any]) -> list[Turn]:
    """Attach the token ids and rankings recorded in ``row`` to the last answers; raise RowError if they do not fit."""
    answers, max_tokens = row["answers"], row.get("max_new_tokens")
    places = [index for index, turn in enumerate(turns) if turn.by_model]
    if not isinstance(answers, list) or not 0 < len(answers) <= len(places):
        raise RowError(f"`answers` must be a list with one entry for each of the model's messages ({len(places)})")
    if max_tokens is not None and not _is_number(max_tokens):
        raise RowError(f"`max_new_tokens` must be a number (found: {max_tokens!r})")
    result = list(turns)
    for index, answer in zip(places[-len(answers) :], answers, strict=True):
        result[index] = _recorded(turns[index], answer, max_tokens)
    return result


def _recorded(turn: Turn, answer: Any, max_tokens: int | None) -> Turn:
    ids = answer.get("output_ids") if isinstance(answer, dict) else None
    if not isinstance(ids, list) or not ids or not all(_is_number(token) for token in ids):
        raise RowError("every entry of `answers` needs `output_ids`, a list of token ids")
    finish = str(answer.get("finish") or "")
    if finish == STOPPED and max_tokens is not None and max_tokens < len(ids):
        raise RowError(f"an answer is {len(ids)} tokens long, and `max_new_tokens` is {max_tokens}")
    rankings = RecordedRankings.of_json(answer["rankings"], len(ids)) if "rankings" in answer else None
    return turn._replace(ids=tuple(ids), finish=finish, rankings=rankings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


CONVERSATION_KEYS = ("conversations", "messages", "conversation")
ID_KEYS = ("id", "question_id", "custom_id", "conversation_id")
ENDPOINTS_WITHOUT_TEXT = ("embedding", "moderation", "image", "audio")
"""Words in the URL of a batch request which show that the request holds no conversation."""
FIRST_ERROR_STATUS = 400
"""Lowest HTTP status of a failed request."""


FORMATS_PAGE = "https://hdtool.github.io/hdtool/guides/input-formats/"


class UnknownFormError(RowError):
    """Raised when a row is in none of the known formats."""

    advice = f"; accepted forms: {FORMATS_PAGE}"


def conversation_of(value: Any) -> Conversation:
    """Parse a row into a conversation; raise RowError if the row holds none or an empty one, or is a RowError."""
    if isinstance(value, RowError):
        raise value
    conversation = _conversation_in(value)
    if not any(turn.ids or not turn.text.isspace() for turn in conversation.turns if turn.text or turn.ids):
        raise RowError("empty text" if conversation.kind == TEXT else "empty conversation")
    for turn in conversation.turns:
        if fault := lone_surrogate(turn.text):
            raise RowError(f"not valid Unicode ({fault})")
    return _with_record_names(conversation, value) if isinstance(value, dict) else conversation


def _with_record_names(conversation: Conversation, row: dict[str, Any]) -> Conversation:
    name = next((row[key] for key in ID_KEYS if isinstance(row.get(key), str | int)), "")
    category = row.get("category")
    return replace(conversation, id=str(name), category="" if category is None else str(category), model=_model_of(row))


def _model_of(row: dict[str, Any]) -> str:
    """Return the model that a row, its request or its response names; empty if none does."""
    bodies: list[Any] = [row]
    for key in ("body", *api.REQUEST_KEYS, *api.RESPONSE_KEYS):
        held = row.get(key)
        bodies += [held, held.get("body")] if isinstance(held, dict) else []
    models = (body["model"] for body in bodies if isinstance(body, dict) and isinstance(body.get("model"), str))
    return next((name for name in models if name), "")


def _conversation_in(value: Any) -> Conversation:
    if isinstance(value, str):
        return Conversation((Turn(ASSISTANT, value),), kind=TEXT)
    if is_conversation(value):
        return Conversation(tuple(message_turns(value, "messages")))
    if not isinstance(value, dict):
        raise RowError(f"a record is an object or a text (found: {type(value).__name__})")
    # A Parquet row has all columns of its file, and columns that it does not use are null.
    row = {key: held for key, held in value.items() if held is not None}
    for form in ROW_FORMS:
        if conversation := form(row):
            return conversation
    if "error" in row:
        raise RowError("a failed request without its messages")
    raise UnknownFormError(f"no conversation, answer or text in it (found: {redacted_record(row)})")


def _batch(row: dict[str, Any]) -> Conversation | None:
    """Parse a line of a batch file: a request or an answer; return None for other rows; a failure raises RowError."""
    if "custom_id" not in row:
        return None
    key = f"custom_id {row['custom_id']}"
    if isinstance(body := row.get("body", row.get("params")), dict):
        if any(part in str(row.get("url")) for part in ENDPOINTS_WITHOUT_TEXT):
            raise RowError(f"a batch request of {row['url']} holds no conversation")
        turns = api.request_turns(body)
        return Conversation(tuple(turns), key=key, prompted=len(turns))
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
    """Return True if a choice is in the format of OpenAI's API."""
    return isinstance(choice, dict) and any(key in choice for key in ("message", "delta", "text"))


def _chat(row: dict[str, Any]) -> Conversation | None:
    key = next((key for key in CONVERSATION_KEYS if key in row), None)
    if key is None:
        return None
    turns = message_turns(row[key], key)
    if turns and turns[0].role != SYSTEM and (system := row.get("system")):
        turns.insert(0, Turn(SYSTEM, content_text(system)))
    if is_collected(row):
        return Conversation(tuple(with_ids(turns, row)), max_new_tokens=row.get("max_new_tokens"))
    answer = None if turns and turns[-1].by_model else _answer(row, structured=True)
    if answer is not None:
        return Conversation((*turns, *answer), prompted=len(turns))
    prompt_messages = row.get("prompt_messages")
    return Conversation(
        tuple(turns),
        prompted=prompt_messages if isinstance(prompt_messages, int) and 0 <= prompt_messages <= len(turns) else 0,
    )


def _exchange(row: dict[str, Any]) -> Conversation | None:
    """Parse a row with a request, a response or both; None if it has neither; an error alone raises RowError."""
    request_turns = _request(row)
    answer = _answer(row, structured=request_turns is not None)
    if request_turns is None and answer is None:
        return None
    if request_turns is None and not answer:
        raise RowError("a failed request without its messages")
    request_turns = request_turns or []
    return Conversation((*request_turns, *(answer or ())), prompted=len(request_turns))


def _request(row: dict[str, Any]) -> list[Turn] | None:
    for key in api.REQUEST_KEYS:
        body = api.body_of(row.get(key))
        if api.is_request(body):
            return api.request_turns(body)
        if isinstance(body, list) and body and all(isinstance(item, dict) for item in body):
            return message_turns(body, key)
    body = api.body_of(row.get("body"))
    if api.is_request(body):
        return api.request_turns(body)
    has_answer = any(_is_structured(row.get(key)) for key in ("choices", *api.RESPONSE_KEYS))
    if "messages" in row or isinstance(row.get("prompt"), list) or (has_answer and api.is_request(row)):
        return api.request_turns(row)
    return None


def _answer(row: dict[str, Any], *, structured: bool) -> list[Turn] | None:
    """Parse the answer in a row: an empty list if the request failed, and None if the row holds no answer.

    A plain string counts as an answer only if ``structured`` is True: if the row also holds messages or a request.
    """
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


def _is_structured(value: Any) -> bool:
    """Return True if a value is an API response, as parsed JSON or as JSON text."""
    body = api.body_of(value) if not isinstance(value, str) or '"choices"' in value or '"object"' in value else None
    return api.is_response(body)


def _failed(response: Any) -> bool:
    if not isinstance(response, dict):
        return False
    status = response.get("status_code", response.get("status"))
    return isinstance(status, int) and status >= FIRST_ERROR_STATUS


def _questions(row: dict[str, Any]) -> Conversation | None:
    turns = row.get("turns")
    if turns is None:
        return None
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
        return Conversation(tuple(message_turns(turns, "turns")))
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise RowError("`turns` must be a list of texts, none of them empty")
    key = f"question {row['question_id']}" if "question_id" in row else ""
    return Conversation(tuple(Turn(USER, turn) for turn in turns), kind=QUESTIONS, key=key)


def _single_message(row: dict[str, Any]) -> Conversation | None:
    if "role" not in row or "content" not in row:
        return None
    return Conversation((Turn(role_of(row["role"]), message_text(row)),))


ROW_FORMS: tuple[Callable[[dict[str, Any]], Conversation | None], ...] = (
    _batch,
    _spec_bench_answers,
    _chat,
    _exchange,
    _questions,
    _single_message,
    prompt_answer_pair,
)
"""Parsers in the order in which they are tried. Each returns None for a row of another format."""
