"""Parse a row of any known format into a conversation, and read and write Spec-Bench answer rows.

The keys of an object determine its format; ``docs/guides/input-formats.md`` lists all formats. Spec-Bench's scripts
read ``choices[0]``: the texts of all turns and, with one number per turn, ``decoding_steps``, ``new_tokens`` and
``wall_time``. ``accept_lengths`` holds the number of tokens that each step of all turns yielded. hdtool adds the other
keys.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdtool.data import conversation as api
from hdtool.data.conversation import (
    ANSWERS,
    ASSISTANT,
    CHAT,
    QUESTIONS,
    REQUEST,
    STOPPED,
    SYSTEM,
    TEXT,
    USER,
    Conversation,
    Rankings,
    Turn,
    content_text,
    lone_surrogate,
    message_text,
    message_turns,
    required_text,
    role_of,
)
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
    return Conversation(tuple(turns), kind=CHAT)


def _text(row: dict[str, Any], key: str) -> str:
    return required_text(row[key], f"`{key}`")


def is_collected(row: dict[str, Any]) -> bool:
    """Return True if ``hdtool collect`` wrote the ``answers`` of a row. Some data sets use this key for other data."""
    answers = row.get("answers")
    ids = isinstance(answers, list) and any(isinstance(answer, dict) and "output_ids" in answer for answer in answers)
    return ids or ("answers" in row and "max_new_tokens" in row)


def with_ids(turns: Sequence[Turn], row: dict[str, Any]) -> list[Turn]:
    """Attach the token ids recorded in ``row`` to the last answers in ``turns``. Earlier ones belong to the prompt."""
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
    rankings = Rankings.of_json(answer["rankings"], len(ids)) if "rankings" in answer else None
    return turn._replace(ids=tuple(ids), finish=finish, rankings=rankings)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class AnsweredTurn:
    """Answer to one turn of a question, with its measurements."""

    text: str
    output_ids: list[int]
    step_tokens: list[int]
    """Number of tokens that each forward pass yielded: the accepted tokens and the bonus token."""
    seconds: float
    """Time from the prompt's token ids to the answer's token ids, including prefill."""
    finish: str
    nodes: int = 0
    """Number of draft tokens in all steps."""
    draft_seconds: float | None = None
    """Drafting time; None if unknown."""
    model_seconds: float | None = None
    """Time in the model's forward passes; None if unknown."""
    drafted_by: list[int] = field(default_factory=list)
    """For each token, the id of the source that drafted it, or 0 for a bonus token; empty if unknown."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """Statistics of each draft source, by the name of the source."""
    first_seconds: float | None = None
    """Time to the first token; None if unknown."""
    cpu_seconds: float | None = None
    """CPU time of all threads of the process; None if unknown."""
    waited_seconds: float | None = None
    """Time that all threads together waited for a core; None if unknown."""


@dataclass(frozen=True)
class AnsweredQuestion:
    """Question with one method's answers to all its turns."""

    question_id: int | str
    category: str
    turns: tuple[AnsweredTurn, ...]
    seconds_rounds: tuple[tuple[float, ...], ...] = ()
    """Seconds that each turn took, by measurement round. ``turns`` holds the answers of one of these rounds."""

    @property
    def tokens_per_second(self) -> float:
        return sum(self.new_tokens) / sum(turn.seconds for turn in self.turns)

    @property
    def new_tokens(self) -> list[int]:
        return [len(turn.output_ids) for turn in self.turns]

    @property
    def step_tokens(self) -> list[int]:
        return [tokens for turn in self.turns for tokens in turn.step_tokens]

    @property
    def output_ids(self) -> list[list[int]]:
        return [turn.output_ids for turn in self.turns]

    def to_json(self, model_id: str) -> dict[str, Any]:
        turns = self.turns
        choice = {
            "index": 0,
            "turns": [turn.text for turn in turns],
            "decoding_steps": [len(turn.step_tokens) for turn in turns],
            "new_tokens": self.new_tokens,
            "wall_time": [turn.seconds for turn in turns],
            "accept_lengths": self.step_tokens,
            "output_ids": self.output_ids,
            "seconds_rounds": self.seconds_rounds,
            **{name: [getattr(turn, name) for turn in turns] for name in (*HDTOOL_TURN_KEYS, *LATER_TURN_KEYS)},
        }
        return {
            "question_id": self.question_id,
            "category": self.category,
            "answer_id": uuid.uuid4().hex,
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> AnsweredQuestion:
        """Parse a row of an answer file. Raises KeyError, TypeError or ValueError if hdtool did not write the row."""
        choice = first_choice(row["choices"])
        lengths = _split_by_turn(choice["accept_lengths"], choice["decoding_steps"])
        names = (*HDTOOL_TURN_KEYS, *(name for name in LATER_TURN_KEYS if name in choice))
        turns = tuple(
            AnsweredTurn(text, output_ids, step_tokens, seconds, **dict(zip(names, hdtool_values, strict=True)))
            for text, output_ids, step_tokens, seconds, *hdtool_values in zip(
                choice["turns"],
                choice["output_ids"],
                lengths,
                choice["wall_time"],
                *(choice[name] for name in names),
                strict=True,
            )
        )
        return cls(row["question_id"], row["category"], turns, tuple(map(tuple, choice["seconds_rounds"])))


HDTOOL_TURN_KEYS = ("finish", "nodes", "draft_seconds", "model_seconds", "drafted_by", "sources")
"""Fields of a turn that hdtool adds to Spec-Bench's format."""
LATER_TURN_KEYS = ("first_seconds", "cpu_seconds", "waited_seconds")
"""More of them, which results of earlier versions lack."""


def first_choice(choices: Any) -> dict[str, Any]:
    """Return the first of a row's ``choices``. Raises ValueError unless it has ``turns``, a list of strings."""
    choice: dict[str, Any] = choices[0] if isinstance(choices, list) and choices else {}
    turns = choice.get("turns") if isinstance(choice, dict) else None
    if not isinstance(turns, list) or not all(isinstance(turn, str) for turn in turns):
        raise ValueError("`choices` must begin with an object that has `turns`, a list of texts")
    return choice


def question_id(name: str) -> int | str:
    """Convert an id to an int if it is a decimal number, as in Spec-Bench's question file."""
    return int(name) if name.isdecimal() and str(int(name)) == name else name


def _split_by_turn(lengths: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
    """Split ``lengths``, the acceptance lengths of all steps, by turn; ``counts`` has each turn's number of steps."""
    if sum(counts) != len(lengths):
        raise ValueError("accept_lengths and decoding_steps differ")
    rest = iter(lengths)
    return [[next(rest) for _ in range(count)] for count in counts]


MAX_KEYS_SHOWN = 6
MAX_TEXT_SHOWN = 20
SECRET_KEYS = re.compile(
    r"(api|access|private|auth)[\W_]?(key|token)|^key$|^token$|secret|passw|authori[sz]|cookie|credential|header|bearer",
    re.IGNORECASE,
)
SECRET_TEXTS = re.compile(r"(sk|pk|hf|gh[pousr]|xox[abp]|ey[Jj])[-_\w]{8}|bearer ", re.IGNORECASE)


def redacted_record(value: Mapping[Any, Any]) -> str:
    """Describe a record without its secrets, as in ``id: 7, question_text: "What is a li...", api_key: hidden``."""
    fields = [f"{_key(key)}: {_value(str(key), held)}" for key, held in list(value.items())[:MAX_KEYS_SHOWN]]
    more = len(value) - len(fields)
    return (", ".join(fields) + (f" and {more} more" if more > 0 else "")) or "nothing"


def _key(key: Any) -> str:
    return " ".join(str(key).split())[:MAX_TEXT_SHOWN]


def _value(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return f"{value:g}" if abs(value) < 1e6 else "a number"
    if SECRET_KEYS.search(key):
        return "hidden"
    if isinstance(value, str):
        return _text_excerpt(value)
    kind, unit = ("object", "keys") if isinstance(value, Mapping) else ("list", "items")
    return f"{kind} of {len(value)} {unit}" if isinstance(value, Mapping | list | tuple) else type(value).__name__


def _text_excerpt(text: str) -> str:
    words = " ".join(text.split())
    # A long text without spaces may be an API key or an access token.
    if SECRET_TEXTS.search(words) or (" " not in words[: 2 * MAX_TEXT_SHOWN] and len(words) > MAX_TEXT_SHOWN):
        return f"text of {len(text)} characters"
    return f'"{words[:MAX_TEXT_SHOWN]}..."' if len(words) > MAX_TEXT_SHOWN else f'"{words}"'


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
    """Parse a row into a conversation. Raises RowError if the row holds none."""
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
    """Parse a line of a batch file, which holds either a request or an answer. Returns None for any other row."""
    if "custom_id" not in row:
        return None
    key = f"custom_id {row['custom_id']}"
    if isinstance(body := row.get("body", row.get("params")), dict):
        if any(part in str(row.get("url")) for part in ENDPOINTS_WITHOUT_TEXT):
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
    """Parse a request with its response, or either of them alone. Returns None if the row has neither."""
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
    """Parse the answer in a row.

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
