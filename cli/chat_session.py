"""A chat session on the terminal: line editor, slash commands and saved conversations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hdtool.cli.answer_output import answer_summary, colors_shown, gain_summary, legend, stream_answer
from hdtool.cli.terminal import wrap_for_terminal
from hdtool.data.conversation import message_turns
from hdtool.data.errors import ContextError, PromptError, did_you_mean
from hdtool.data.input_files import input_errors_as
from hdtool.data.notes import note, tell
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import json_object
from hdtool.data.prompts import Message, Prompt
from hdtool.data.row_readers import RowError
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.core.step import Finish, Stats
from hdtool.runtime.settings.draft_sources import SourceId

ReadMessage = Callable[[], str]
"""Function that returns the next message and raises EOFError at the end of the input."""
INPUT_PROMPT = "> "


def is_interactive() -> bool:
    """Return True if both standard input and standard output are terminals."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def message_reader() -> ReadMessage:
    """Return a line editor if the session is on a terminal, else a function that reads lines from standard input."""
    return _line_editor() if is_interactive() else _next_line


def _line_editor() -> ReadMessage:
    """Return an editor in which Enter sends the message and Alt-Enter starts a new line.

    Pasted text may contain line breaks. The editor recalls earlier messages until the program ends and writes none of
    them to disk.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

    keys = KeyBindings()

    @keys.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(INPUT_PROMPT, multiline=True, key_bindings=keys)

    def read() -> str:
        while True:
            with suppress(KeyboardInterrupt):  # Ctrl-C discards the line
                return session.prompt()

    return read


def _next_line() -> str:
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    if not line:
        raise EOFError
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise PromptError("standard input is not UTF-8 text: pipe messages in as text, one per line") from None


SAVED_BY = {"saved_by": "hdtool chat"}


def write_chat(path: Path, model: str, messages: Sequence[Message], replaceable: set[Path]) -> None:
    """Write a conversation to ``path`` as JSON, and add the resolved path to ``replaceable``.

    Raise PromptError if the file exists, unless ``replaceable`` contains it and hdtool wrote it.
    """

    def is_ours(candidate: Path) -> bool:
        return candidate.resolve() in replaceable and json_object(candidate).get("saved_by") == SAVED_BY["saved_by"]

    advice = "choose another name, or move it away"
    file = OutputFile(path, "a conversation that was saved or loaded since the start", is_ours, PromptError, advice)
    file.write(json.dumps({**SAVED_BY, "model": model, "messages": messages}, ensure_ascii=False) + "\n")
    replaceable.add(path.resolve())


def read_chat(path: Path) -> list[Message]:
    """Return the messages of a saved conversation.

    Raise PromptError if the file does not hold exactly one conversation, or if that conversation is empty.
    """
    with input_errors_as(path, PromptError):
        row = json_object(path)
    if "messages" not in row:
        raise PromptError(f"{path} is not one conversation with messages: name a file that /save wrote")
    try:
        turns = message_turns(row["messages"], "messages")
    except RowError as fault:
        raise PromptError(f"{path}: {fault}: correct it, or name a file that /save wrote") from None
    if not turns:
        raise PromptError(f"{path} holds no messages: name a file that /save wrote")
    return [{"role": turn.role, "content": turn.text} for turn in turns]


COMMAND_PREFIX = "/"
NEEDED = {"FILE": "the name of a file", "NUMBER": "a number"}
"""Descriptions of the arguments that slash commands require, by the names that /help shows."""
GREEDY_NOTE = "at temperature 0 the answer is the same again: /temperature 0.7 lets the next /retry draw another"
CONTEXT_ADVICE = "/undo takes back the last turn, /clear begins a new conversation"
FINISH_NOTES = {
    Finish.LENGTH: "the answer stopped at --max-new-tokens",
    Finish.CONTEXT: f"the answer stopped at the end of the model's context: {CONTEXT_ADVICE}",
    Finish.INTERRUPT: "interrupted: the answer so far is part of the conversation",
}


class ChatSession:
    """Chat session with one model, over one or more conversations."""

    def __init__(self, answerer: Answerer, system: str | None = None, *, stats: bool = False, color: bool = False):
        self.messages: list[Message] = []
        self.is_over = False
        self.is_interrupted = False
        """True if Ctrl-C ended the last answer."""
        self._answerer = answerer
        self._shows_stats = stats
        self._colored = False
        self._explained: set[SourceId] = set()
        """Sources whose colors the legend has shown."""
        self._stats: list[Stats] = []
        """Statistics of all answers in this session."""
        self._answered_greedily: list[Message] = []
        """Messages that the last answer replied to, if it was greedy and complete, so that a retry would repeat it."""
        self._files: set[Path] = set()
        """Resolved paths that this session wrote or read, and may overwrite."""
        self._commands: dict[str, tuple[Callable[[str], None], str, str]] = {
            "help": (self._help, "", "list the commands"),
            "stats": (self._show_stats, "", "figures of the last answer and of all answers, and what drafts gained"),
            "color": (self._switch_color, "", "colour tokens by the source that drafted them, or stop it"),
            "system": (self._set_system, "[TEXT]", "set the system message, or remove it"),
            "temperature": (self._set_temperature, "NUMBER", "draw the next answers at this temperature; 0 is greedy"),
            "undo": (self._undo, "", "take back the last message and its answer"),
            "retry": (self._retry, "", "answer the last message again, with the next seed"),
            "clear": (self._clear, "", "begin a new conversation with the same system message"),
            "save": (self._save, "FILE", "write the conversation as JSONL, which build-model-db reads"),
            "load": (self._load, "FILE", "go on with a saved conversation"),
            "exit": (self._exit, "", "leave, as Ctrl-D does"),
        }
        if system is not None:
            self._set_system(system)
        if color:
            self._switch_color("")

    def take(self, text: str) -> None:
        """Answer a message, or run a slash command."""
        if text.startswith(COMMAND_PREFIX):
            self._run(text)
        elif text.strip():
            self._ask([*self.messages, {"role": "user", "content": text}])

    def _run(self, text: str) -> None:
        name, _, argument = text[1:].strip().partition(" ")
        if name not in self._commands:
            raise PromptError(
                f"there is no command /{name}{did_you_mean(name, self._commands)}: /help lists them; a message that "
                "begins with / needs a space before it"
            )
        run, takes, _ = self._commands[name]
        argument = argument.strip()
        if argument and not takes:
            raise PromptError(f"/{name} takes nothing after it, got {argument}: leave it out")
        if takes in NEEDED and not argument:
            raise PromptError(f"/{name} needs {NEEDED[takes]}: /{name} {takes}")
        run(argument)

    def _ask(self, messages: list[Message]) -> None:
        """Answer the last of these messages, and store the messages and the answer as the session's conversation.

        If Ctrl-C comes before any text, the conversation stays unchanged. Raise PromptError if the context is full.
        """
        self.is_interrupted = False
        try:
            for answer in self._answerer.all_answers([Prompt(tuple(messages))]):
                stream_answer(answer, color=self._colored)
        except ContextError as error:
            raise PromptError(f"the conversation is full ({error.found}): {CONTEXT_ADVICE}") from None
        self.is_interrupted = answer.interrupted
        self._stats.append(answer.stats)
        if self._colored and not self._explained.issuperset(helped := answer.stats.that_helped):
            self._explained.update(helped)
            tell(legend(sorted(self._explained)))
        if answer.interrupted and not answer.text:
            return note("interrupted: the message is not part of the conversation")
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        is_final = self._answerer.sampling.is_greedy and not answer.interrupted
        self._answered_greedily = messages if is_final else []
        if ending := answer.stats.finish and FINISH_NOTES.get(answer.stats.finish):
            note(ending)
        if self._shows_stats:
            tell(answer_summary(answer.stats))
        return None

    def _help(self, _: str) -> None:
        lines = {f"/{name} {takes}".strip(): text for name, (_, takes, text) in self._commands.items()}
        print("\n".join(f"{usage:{max(map(len, lines))}}  {text}" for usage, text in lines.items()))
        print("Enter sends, Alt-Enter begins a new line, Ctrl-C ends an answer, Ctrl-D leaves")

    def _show_stats(self, _: str) -> None:
        if not self._stats:
            raise PromptError("there are no figures yet: ask something first")
        last, every = self._stats[-1], Stats.total(self._stats)
        lines = [answer_summary(last), f"  prompt tokens kept from the turn before: {last.cached_tokens:,}"]
        if len(self._stats) > 1:
            lines.append(f"{len(self._stats)} answers: {answer_summary(every)}")
        print(wrap_for_terminal("\n".join([*lines, gain_summary(every, color=self._colored)])))

    def _switch_color(self, _: str) -> None:
        if not self._colored and not colors_shown():
            return note("colours need a terminal or FORCE_COLOR, and no NO_COLOR")
        self._colored = not self._colored
        self._explained.clear()
        tell("colours on" if self._colored else "no colours")
        return None

    @property
    def _turns(self) -> list[Message]:
        """Messages without the system message."""
        return [message for message in self.messages if message["role"] != "system"]

    def _set_system(self, text: str) -> None:
        self.messages = [*([{"role": "system", "content": text}] if text else []), *self._turns]

    def _undo(self, _: str) -> None:
        self.messages = self.messages[: self._last_question()]

    def _retry(self, _: str) -> None:
        messages = self.messages[: self._last_question() + 1]
        sampling = self._answerer.sampling
        if sampling.is_greedy and messages == self._answered_greedily:
            note(GREEDY_NOTE)
        self._answerer.sampling = replace(sampling, seed=(sampling.seed + 1) % 2**64)
        self._ask(messages)

    def _set_temperature(self, given: str) -> None:
        try:
            temperature = float(given)
        except ValueError:
            raise PromptError(f"/temperature needs a number, got {given}: as in /temperature 0.7") from None
        self._answerer.sampling = replace(self._answerer.sampling, temperature=temperature)

    def _last_question(self) -> int:
        """Return the index of the last user message; raise PromptError if there is none."""
        places = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not places:
            raise PromptError("the conversation has no message yet: ask something first")
        return places[-1]

    def _clear(self, _: str) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]

    def _save(self, name: str) -> None:
        if not self._turns:
            raise PromptError("there is nothing to save yet: ask something first")
        path = Path(name).expanduser()
        write_chat(path, self._answerer.loaded.name, self.messages, self._files)
        tell(f"saved {len(self.messages)} messages in {path}")

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        self.messages = read_chat(path)
        self._files.add(path.resolve())
        count = f"{len(self.messages)} message{'s' * (len(self.messages) > 1)}"
        unanswered = "; the last one has no answer: /retry answers it" if self.messages[-1]["role"] == "user" else ""
        tell(f"loaded {count} of {path}{unanswered}")

    def _exit(self, _: str) -> None:
        self.is_over = True
