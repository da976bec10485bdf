"""Read conversations, recorded answers and plain texts, either as texts for stores or as traces to replay.

Each turn of a conversation is a separate text. From a request and its response, only the turns after the last answer in
the request count, because earlier requests held the earlier turns. Any conversation with an answer of the model can be
replayed, but Spec-Bench's answer files need the question file as well. Unusable records are counted, and too many are
an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from hdtool.data.conversation import ANSWERS, QUESTIONS, STOPPED, Conversation, RecordedRankings, with_answers
from hdtool.data.conversation_files import ConversationReader, LocatedConversation
from hdtool.data.errors import OptionError, RecordError
from hdtool.data.prompts import Message
from hdtool.data.record_counts import TOLERANCE, Tally
from hdtool.data.row_readers import RowError


@dataclass(frozen=True)
class Record:
    """Related texts, each of which becomes a document; ``source`` is the index of their input file."""

    texts: tuple[str, ...]
    source: int


@dataclass(frozen=True)
class Portion:
    """A section of an input, as texts and record counts, read in one process for use in another."""

    texts: Sequence[str]
    tally: Tally
    consumed: int
    """Bytes of the input read so far."""
    is_last: bool = False
    had_text: bool = False
    """True if the portion had texts before ``without_texts`` removed them."""

    def without_texts(self) -> Portion:
        return replace(self, texts=(), had_text=bool(self.texts))


class RecordReader(ConversationReader):
    """Reader that yields the records in files and counts usable and unusable records."""

    def __init__(self, inputs: Sequence[Path], *, answers_only: bool = False, tolerance: float = TOLERANCE) -> None:
        self.answers_only = answers_only
        super().__init__(inputs, tolerance=tolerance)

    def restart(self) -> None:
        super().restart()
        self._finished_bytes = 0
        self._has_records = False

    def __iter__(self) -> Iterator[Record]:
        self.restart()
        for located in chain.from_iterable(map(self.read_input, range(len(self.inputs)))):
            if texts := self._texts_of(located.conversation):
                self._has_records = True
                yield Record(texts, located.source)
        self.finish()

    def portions(self, texts: int) -> Iterator[Portion]:
        """Yield the reader's only input in portions; the process that uses them must pass each one to ``take``.

        Each portion but the last has at least ``texts`` texts.
        """
        self.restart()
        held: list[str] = []
        for located in self.read_input(0):
            held += self._texts_of(located.conversation)
            if len(held) >= texts:
                yield Portion(held, self.tally, self.bytes_read)
                held, self.tally = [], Tally()
        yield Portion(held, self.tally, self.bytes_read, is_last=True)

    def take(self, portion: Portion) -> None:
        """Count the records of a portion that another process read; portions must arrive in the order of the inputs."""
        self.tally.add(portion.tally)
        self._has_records |= portion.had_text
        self.bytes_read = self._finished_bytes + portion.consumed
        if portion.is_last:
            self._finished_bytes = self.bytes_read

    def finish(self) -> None:
        """Raise RecordError if too many records are unusable, or if none has a usable text."""
        self.tally.check(self._tolerance)
        if not self._has_records:
            what = "answers of a model" if self.answers_only else "text"
            raise RecordError(f"no {what} found in {_file_names(self.inputs)}: name files that hold some")

    def _texts_of(self, conversation: Conversation) -> tuple[str, ...]:
        """Return the texts of the new turns that aren't blank; with ``answers_only``, only those that the model wrote.

        Answers that a request repeats do not count as written by the model.
        """
        turns = conversation.new_turns
        first_answer = conversation.prompted - (len(conversation.turns) - len(turns))
        return tuple(
            turn.text
            for index, turn in enumerate(turns)
            if not self.answers_only or (turn.by_model and index >= first_answer)
            if turn.text.strip()
        )


def _file_names(paths: Sequence[Path]) -> str:
    if not paths:
        return "no input at all"
    return f"{paths[0]} and {len(paths) - 1} more" if len(paths) > 1 else str(paths[0])


@dataclass(frozen=True)
class RecordedAnswer:
    """One of the model's answers in a recorded conversation."""

    message_index: int
    """Index of the answer's message in the conversation."""
    ids: tuple[int, ...] | None = None
    """Recorded token ids, including the one that ends the turn; None if there are none."""
    max_tokens: int | None = None
    """Maximum length of the answer in tokens, if known; the answer's own length if the model did not end it."""
    rankings: RecordedRankings | None = None


@dataclass(frozen=True)
class Trace:
    """A conversation and those of its answers that can be replayed."""

    id: str
    category: str
    messages: tuple[Message, ...]
    answers: tuple[RecordedAnswer, ...]
    where: str
    """File and line, for error messages."""


def read_traces(
    paths: Sequence[Path], questions: Path | None = None, *, tolerance: float = TOLERANCE, tally: Tally | None = None
) -> list[Trace]:
    """Return a trace of each conversation in the files, in order. Unusable records are counted in ``tally``.

    Raise RecordError if too many are unusable or none holds an answer, and OptionError if ``questions`` fit none.
    """
    questions_by_key = _questions(questions) if questions else {}
    reader = ConversationReader(paths, tolerance=1.0)
    traces: list[Trace] = []
    joined = 0
    for located in reader.conversations():
        try:
            joined += bool(questions_by_key) and located.conversation.kind == ANSWERS
            traces.append(_trace(located, questions_by_key))
        except RowError as fault:
            reader.tally.refuse(located.where, fault)
    if tally is not None:
        tally.add(reader.tally)
    reader.tally.check(tolerance)
    if questions and not joined:
        raise OptionError(f"--questions {questions} belongs to answer files of Spec-Bench, and no trace is one")
    if not any(trace.answers for trace in traces):
        names = ", ".join(map(str, paths))
        raise RecordError(f"no answers of a model are in {names}: name conversations with assistant messages")
    return traces


def _questions(path: Path) -> Mapping[str, Conversation]:
    """Read Spec-Bench's questions into a dict, each under the ``key`` that its answers have."""
    reader = ConversationReader([path])
    conversations = {
        f"question {conversation.conversation.id}": conversation.conversation for conversation in reader.conversations()
    }
    return {key: replace(conversation, kind=QUESTIONS) for key, conversation in conversations.items()}


def _trace(located: LocatedConversation, questions: Mapping[str, Conversation]) -> Trace:
    conversation = located.conversation
    if conversation.kind == ANSWERS:
        conversation = with_answers(_question_of(conversation, questions), conversation)
    messages = tuple({"role": turn.role, "content": turn.text} for turn in conversation.turns)
    return Trace(
        conversation.id or str(located.row.number),
        conversation.category,
        messages,
        tuple(_recorded_answers(conversation)),
        located.where,
    )


def _question_of(answers: Conversation, questions: Mapping[str, Conversation]) -> Conversation:
    if not answers.key.startswith("question "):
        raise RowError("an answer of a batch without its request: name the file of the requests too")
    if not questions:
        raise RowError(
            "answers without their questions, as Spec-Bench writes them: name the questions with --questions FILE"
        )
    if answers.key not in questions:
        raise RowError(f"it answers {answers.key}, which the file of questions lacks: name the file of these questions")
    return questions[answers.key]


def _recorded_answers(conversation: Conversation) -> Iterator[RecordedAnswer]:
    for place in conversation.answers:
        turn = conversation.turns[place]
        if turn.ids:
            max_tokens = conversation.max_new_tokens if turn.finish == STOPPED else len(turn.ids)
            yield RecordedAnswer(place, turn.ids, max_tokens, turn.rankings)
        elif turn.text.strip():
            yield RecordedAnswer(place)
