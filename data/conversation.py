"""Conversations and their turns, and parsers for messages and for OpenAI-style requests and responses.

A request has ``messages`` (chat), ``prompt`` (completions) or ``input`` (responses). A response has ``choices``,
``output`` or ``content``, or is a list of streamed chunks. Headers, API keys and other fields are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from hdtool.data.row_readers import RowError, parse_json

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


LOGPROB_DIGITS = 4
"""Decimal places of log-probabilities in files."""
LOWEST_LOGPROB = -9999.0
"""Lowest log-probability in files. It replaces minus infinity, which JSON cannot express."""


@dataclass(frozen=True, eq=False)
class RecordedRankings:
    """Top-k tokens at each position of an answer, best first, with their log-probabilities.

    Both arrays have shape ``[positions, k]``. Each token of the answer was chosen from the row of its position.
    """

    tokens: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]

    def as_json(self) -> dict[str, Any]:
        import numpy as np

        rounded = np.maximum(self.logprobs.astype(float), LOWEST_LOGPROB).round(LOGPROB_DIGITS)
        return {"tokens": self.tokens.tolist(), "logprobs": rounded.tolist()}

    @classmethod
    def of_json(cls, value: Any, positions: int) -> RecordedRankings:
        """Parse rankings; raise RowError unless they are valid and have one row for each of ``positions`` tokens."""
        import numpy as np

        try:
            rankings = cls(np.array(value["tokens"], np.int32), np.array(value["logprobs"], np.float32))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise RowError("`rankings` need `tokens` and `logprobs`, with equally many numbers in each row") from None
        shape = rankings.tokens.shape
        if len(shape) != 2 or shape != rankings.logprobs.shape or shape[0] != positions or not shape[1]:
            raise RowError(f"`rankings` need a row of tokens and one of logprobs for each of {positions} output_ids")
        if rankings.tokens.min() < 0:
            raise RowError("`rankings` hold a negative token")
        return rankings


SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)

CHAT = "chat"
TEXT = "text"
"""Plain text: a document, an answer or a prompt, depending on the command."""
QUESTIONS = "questions"
"""User turns that are answered one after another, as in Spec-Bench's question file."""
ANSWERS = "answers"
"""Answers whose questions are in other rows."""
STOPPED = "stop"
"""``finish`` of an answer that the model ended itself."""


class Turn(NamedTuple):
    """Message of a conversation, with the recorded tokens if it is an answer."""

    role: str
    text: str
    ids: tuple[int, ...] | None = None
    """Token ids of a recorded answer, including the token that ends it; None if they were not recorded."""
    finish: str = ""
    """How a recorded answer ended: ``stop``, or the limit that it reached."""
    rankings: RecordedRankings | None = None
    """The model's top-k tokens at each position of a recorded answer."""

    @property
    def by_model(self) -> bool:
        return self.role == ASSISTANT


@dataclass(frozen=True)
class Conversation:
    """Conversation or request, questions, answers, or a plain text, depending on ``kind``."""

    turns: tuple[Turn, ...]
    id: str = ""
    category: str = ""
    kind: str = CHAT
    key: str = ""
    """Key by which questions or a request are matched with their answers in other rows."""
    max_new_tokens: int | None = None
    """Limit under which the recorded answers were generated; None if unknown."""
    prompted: int = 0
    """Number of leading turns that were sent to the model, including the model's earlier answers; 0 if unknown."""
    model: str = field(default="", compare=False)
    """Name of the model that answered, as given in the record; empty if the record names none."""

    @property
    def answers(self) -> list[int]:
        """Indices of the answers: turns with recorded tokens or, if none, assistant turns that follow another role.

        Turns of the prompt count only if their tokens were recorded.
        """
        if recorded := [index for index, turn in enumerate(self.turns) if turn.ids]:
            return recorded
        roles = [turn.role for turn in self.turns]
        indices = range(max(1, self.prompted), len(roles))
        return [index for index in indices if roles[index] == ASSISTANT != roles[index - 1]]

    @property
    def new_turns(self) -> tuple[Turn, ...]:
        """Turns that earlier requests of this conversation did not contain: those after the prompt's last answer."""
        earlier = [index for index, turn in enumerate(self.turns[: self.prompted]) if turn.by_model]
        return self.turns[earlier[-1] + 1 if earlier else 0 :]


def with_answers(questions: Conversation, answers: Conversation) -> Conversation:
    """Combine questions (or a request) with answers; unanswered questions are dropped, extra answers raise RowError."""
    turns: Sequence[Turn] = (*questions.turns, *answers.turns)
    prompted = len(questions.turns)
    if questions.kind == QUESTIONS:
        if len(answers.turns) > len(questions.turns):
            raise RowError(f"{len(answers.turns)} answers to a question of {len(questions.turns)} turns")
        turns = [turn for pair in zip(questions.turns, answers.turns, strict=False) for turn in pair]
        prompted = 0
    category = questions.category or answers.category
    model = questions.model or answers.model
    return replace(questions, turns=tuple(turns), category=category, kind=CHAT, key="", prompted=prompted, model=model)


ROLE_NAMES = {
    SYSTEM: ("system", "developer"),
    USER: ("user", "human", "prompter"),
    ASSISTANT: ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot", "function_call"),
    TOOL: ("tool", "function", "function_response", "observation", "ipython", "environment"),
}
"""Names of each role in the supported data sets and APIs."""
ROLE_BY_NAME = {name: role for role, names in ROLE_NAMES.items() for name in names}
MESSAGE_TEXT_KEYS = ("value", "content", "text")
CALL_KEYS = ("tool_calls", "function_call", "refusal")
"""Keys whose presence allows a message to lack text."""
REASONING_TYPES = ("reasoning", "thinking", "redacted_thinking", "summary_text", "reasoning_text")
"""Types of message parts that do not belong to the answer."""
ITEM_ROLES = {
    **dict.fromkeys(("function_call", "custom_tool_call"), ASSISTANT),
    **dict.fromkeys(("function_call_output", "custom_tool_call_output"), TOOL),
}
"""Roles of the Responses API's items that are not messages."""


def message_turns(value: Any, name: str) -> list[Turn]:
    """Parse the messages ``value`` of a field ``name``, skipping reasoning; raise RowError if they are malformed."""
    messages = _as_list(value)
    if not isinstance(messages, list):
        raise RowError(f"`{name}` must be a list (found: {type(value).__name__})")
    return [turn for message in messages if (turn := _turn(message)) is not None]


def _as_list(value: Any) -> Any:
    """Decode a list of messages from JSON text or a dict with one list per key; other values are returned unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        return parse_json(value)
    if isinstance(value, dict) and value and all(isinstance(column, list) for column in value.values()):
        return [dict(zip(value, row, strict=False)) for row in zip(*value.values(), strict=False)]
    return value


def _turn(message: Any) -> Turn | None:
    kind = message.get("type") if isinstance(message, dict) else None
    if isinstance(kind, str) and kind in ITEM_ROLES:
        return Turn(ITEM_ROLES[kind], content_text(message.get("output")))
    if kind in REASONING_TYPES:
        return None
    if not isinstance(message, dict) or not any(key in message for key in (*MESSAGE_TEXT_KEYS, *CALL_KEYS)):
        raise _incomplete_message_error()
    text = message_text(message)
    if (role_name := message.get("from") or message.get("role")) is None:
        raise _incomplete_message_error()
    return Turn(role_of(role_name), text)


def _incomplete_message_error() -> RowError:
    return RowError("a turn needs a role and a text, as `from` and `value` or as `role` and `content`")


def role_of(name: Any) -> str:
    """Return the role that a name stands for; raise RowError for an unknown name."""
    role = ROLE_BY_NAME.get(str(name).lower())
    if role is None:
        raise RowError(f"unknown role {str(name)[:40]!r}: expected one of {', '.join(ROLES)}")
    return role


def message_text(message: dict[str, Any]) -> str:
    """Return a message's text, or its refusal if it has no text; "" for a message that only calls a tool."""
    held = [message[key] for key in MESSAGE_TEXT_KEYS if key in message]
    text = content_text(next((text for text in held if text is not None), None))
    refusal = message.get("refusal")
    return refusal if not text and isinstance(refusal, str) else text


def content_text(content: Any) -> str:
    """Return the text of a message's content (a string, null, or a list of parts) without reasoning and media parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        return "\n".join(_texts(content))
    return required_text(content, "a turn's text")


def _texts(parts: list[Any]) -> Iterator[str]:
    for part in parts:
        if not isinstance(part, dict):
            raise RowError("a message in parts needs objects with a `text`")
        if part.get("type") in REASONING_TYPES:
            continue
        text = part.get("text") if part.get("text") is not None else part.get("refusal")
        if isinstance(text, dict):  # the Assistants API wraps a text together with annotations
            text = text.get("value")
        if text is not None:
            yield required_text(text, "the `text` of a message's part")


def required_text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{name} must be a text (found: {type(value).__name__})")
    return value


REQUEST_KEYS = ("request", "request_body", "inputs", "input", "kwargs")
RESPONSE_KEYS = ("response", "response_body", "outputs", "output", "completion")
BODY_KEYS = ("body", "json", "json_body")
REQUEST_SYSTEM_KEYS = ("system", "instructions")
SSE_PREFIX = "data:"
"""Prefix of the lines with data in a streamed response (server-sent events)."""


def is_request(value: Any) -> bool:
    return isinstance(value, dict) and (
        "messages" in value or "prompt" in value or isinstance(value.get("input"), str | list)
    )


def is_response(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(isinstance(chunk, dict) for chunk in value)
    return isinstance(value, dict) and any(
        key in value for key in ("choices", "output", "output_text", "message", "error", "response", "content")
    )


def body_of(value: Any) -> Any:
    """Return the body of a request or a response, which a log may nest in other fields or encode as text."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        value = parse_json(value)
    if isinstance(value, dict) and not is_request(value):
        for key in BODY_KEYS:
            if key in value and (isinstance(value[key], dict) or _is_json(value[key])):
                return body_of(value[key])
    return value


def _is_json(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("{")


def request_turns(body: dict[str, Any]) -> list[Turn]:
    """Parse a request into turns, the system message first."""
    system = next((content_text(body[key]) for key in REQUEST_SYSTEM_KEYS if body.get(key)), "")
    return ([Turn(SYSTEM, system)] if system else []) + _request_messages(body)


def _request_messages(body: dict[str, Any]) -> list[Turn]:
    for key in ("messages", "input", "prompt"):
        value = body.get(key)
        if isinstance(value, str) and key != "messages":
            return [Turn(USER, value)]
        if isinstance(value, list) and value and isinstance(value[0], str | int | list):
            if len(value) == 1 and isinstance(value[0], str):
                return [Turn(USER, value[0])]
            raise RowError(
                f"`{key}` is a list of {'texts' if isinstance(value[0], str) else 'token ids'}: give one text"
            )
        if value is not None:
            return message_turns(value, key)
    raise RowError("a request without `messages`, `prompt` or `input`")


def answer_turns(response: Any) -> list[Turn]:
    """Parse a response into the answer's turns, none if the request failed; raise RowError if the form is unknown."""
    if isinstance(response, str):
        text = _streamed(response) if response.lstrip().startswith(SSE_PREFIX) else response
        return [Turn(ASSISTANT, text)]
    if isinstance(response, list):
        return _list_turns(response)
    if not isinstance(response, dict) or response.get("error"):
        return []
    if isinstance(choices := response.get("choices"), list):
        return _choice_turns(choices)
    if isinstance(output := response.get("output"), list):
        return [turn for turn in message_turns(output, "output") if turn.by_model]
    for key in ("output_text", "output", "text", "response", "completion"):
        if isinstance(response.get(key), str):
            return [Turn(ASSISTANT, response[key])]
    message = response.get("message", response)
    if isinstance(message, dict) and ("content" in message or "tool_calls" in message):
        return [Turn(ASSISTANT, message_text(message))]
    raise RowError("a response without `choices`, `output` or `content`")


def _list_turns(parts: list[Any]) -> list[Turn]:
    """Parse a list of streamed chunks into one turn, or a list of messages into the model's turns among them."""
    if any(isinstance(part, dict) and ("choices" in part or "delta" in part) for part in parts):
        return [Turn(ASSISTANT, _joined(parts))]
    return [turn for turn in message_turns(parts, "output") if turn.by_model]


def _choice_turns(choices: list[Any]) -> list[Turn]:
    """Return one turn with the text of the first choice that has any, or an empty list if there are no choices."""
    texts = [_choice_text(choice) for choice in sorted(choices, key=_choice_index)]
    if not texts:
        return []
    return [Turn(ASSISTANT, next((text for text in texts if text), ""))]


def _choice_index(choice: Any) -> int:
    index = choice.get("index") if isinstance(choice, dict) else None
    return index if isinstance(index, int) else 0


def _choice_text(choice: Any) -> str:
    if not isinstance(choice, dict):
        raise RowError("`choices` must be a list of objects")
    if isinstance(message := choice.get("message"), dict):
        return message_text(message)
    return required_text(choice["text"], "the `text` of a choice") if choice.get("text") is not None else ""


def _streamed(text: str) -> str:
    lines = (line.strip().removeprefix(SSE_PREFIX).strip() for line in text.split("\n"))
    return _joined(parse_json(line) for line in lines if line.startswith("{"))


def _joined(chunks: Iterable[Any]) -> str:
    """Concatenate the text of the first choice in streamed chunks; raise RowError unless every chunk is an object."""
    texts: list[Any] = []
    for chunk in chunks:
        if not isinstance(chunk, dict):
            raise RowError("a streamed response must be a list of objects")
        delta = chunk.get("delta")
        if isinstance(delta, str) and str(chunk.get("type")).endswith("output_text.delta"):
            texts.append(delta)
        elif isinstance(delta, dict):
            texts.append(delta.get("text"))
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict) and _choice_index(choice) == 0:
                inner = choice.get("delta")
                texts.append(inner.get("content") if isinstance(inner, dict) else choice.get("text"))
    return "".join(text for text in texts if isinstance(text, str))
