"""Result folders of ``hdtool bench``, with the run's settings and one JSON Lines file of answers per method.

A question is done once every file holds a line for it, and the lines are flushed to disk before the next question
starts. After a kill, the files differ by at most one question and a torn line, which a resumed run truncates. A larger
difference means that another program changed the files, and is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.data.durable_files import append_row, cut_torn_line, file_lock, is_torn, may_be_torn_start, read_lines
from hdtool.data.errors import ResultError, os_errors_as
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_json_with

RESULTS_FORMAT = 1
RUN_FILE = "run.json"
CHOOSE_ANOTHER_FOLDER = "choose another --out, or move that folder away to start again"


@dataclass(frozen=True)
class BenchRun:
    """Settings and environment of a benchmark run."""

    options: dict[str, Any]
    """Options of the command. A folder never mixes answers from runs with different options."""
    methods: tuple[str, ...]
    questions: int
    surroundings: dict[str, Any] = field(default_factory=dict)
    started: str = ""

    @classmethod
    def read(cls, folder: Path) -> BenchRun | None:
        """Read the run stored in a folder, or return None if there is none; raise ResultError for an unusable file."""
        path = folder / RUN_FILE
        try:
            with os_errors_as(ResultError, f"{path} cannot be read", "choose another --out"):
                if not path.exists():
                    return None
                row = json.loads(path.read_text(encoding="utf-8"))
            format = row.pop("format")
            if format != RESULTS_FORMAT:
                raise ResultError(
                    f"{path} has format {format}, this hdtool reads {RESULTS_FORMAT}: {CHOOSE_ANOTHER_FOLDER}"
                )
            return cls(**{**row, "methods": tuple(row["methods"])})
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ResultError(f"{path} is not a run of hdtool bench: {CHOOSE_ANOTHER_FOLDER}") from None

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": RESULTS_FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"
        is_run = is_json_with(("options", "methods", "questions"), RESULTS_FORMAT)
        OutputFile(folder / RUN_FILE, "a run of hdtool bench", is_run, ResultError, CHOOSE_ANOTHER_FOLDER).write(text)


@dataclass(frozen=True)
class Results:
    """Benchmark run and each method's answers in question order, up to the last question that all methods answered."""

    run: BenchRun
    answers: dict[str, list[AnsweredQuestion]]

    @property
    def complete(self) -> bool:
        return all(len(answers) == self.run.questions for answers in self.answers.values())


def read_results(folder: Path) -> Results:
    """Read the results in a folder, even of an incomplete run; raise ResultError if none can be read."""
    run = BenchRun.read(folder)
    if run is None:
        raise ResultError(f"{folder} holds no results: make some with hdtool bench --out {folder}")
    answers = {method: _MethodFile.read(folder / _results_file(method)).answers for method in run.methods}
    shared = min(map(len, answers.values()))
    return Results(run, {method: rows[:shared] for method, rows in answers.items()})


def refuse_other_options(folder: Path, run: BenchRun, options: Mapping[str, Any]) -> None:
    """Raise ResultError unless the run stored in a folder was started with these options."""
    for name, requested in options.items():
        if name not in run.options:
            option = f"--{name.replace('_', '-')}"
            raise ResultError(
                f"{folder} holds an incomplete run of an hdtool without {option}: {CHOOSE_ANOTHER_FOLDER}"
            )
        recorded = run.options.get(name)
        if recorded != requested:
            if name == "questions":
                raise ResultError(f"{folder} holds a run over other questions: {CHOOSE_ANOTHER_FOLDER}")
            option = f"{name.replace('_', '-')} {_json_text(recorded)}, not {_json_text(requested)}"
            raise ResultError(f"{folder} holds a run with {option}: {CHOOSE_ANOTHER_FOLDER}")


def refuse_files_without_run(folder: Path, methods: Collection[str]) -> None:
    """Raise ResultError if a folder holds answer files of these methods but no ``run.json``."""
    if BenchRun.read(folder) is None:
        for path in (folder / _results_file(method) for method in methods):
            if os.path.lexists(path):
                raise ResultError(f"{path} exists, but {RUN_FILE} does not: choose another --out")


@contextmanager
def locked_results(folder: Path) -> Iterator[None]:
    """Create and lock a results folder; raise ResultError if it is already locked, or for an OSError in the block."""
    busy = ResultError(f"another bench is writing {folder}: wait for it, or choose another --out")
    advice = "answers in it are kept; make room or choose another --out, and run the command again"
    with os_errors_as(ResultError, f"{folder} cannot be written", advice):
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder / ".lock", busy):
            yield


class ResultFolder:
    """Writer of a benchmark's answers to a results folder that the caller has locked."""

    def __init__(self, folder: Path, run: BenchRun, ids: Sequence[int | str]) -> None:
        """Start a run over the questions ``ids``, or resume the folder's; raise ResultError if that is another run."""
        self.folder = folder
        self.run = run
        self.answered = self._resume(ids)
        """Number of questions that every method has answered."""

    def add(self, answers: Mapping[str, AnsweredQuestion]) -> None:
        """Append the answers to the next question, each to its method's file, and flush the files to disk."""
        for method, answer in answers.items():
            append_row(
                self.folder / _results_file(method), answer.to_json(f"{self.run.surroundings['model']}-{method}")
            )
        self.answered += 1

    def _resume(self, ids: Sequence[int | str]) -> int:
        refuse_files_without_run(self.folder, self.run.methods)
        before = BenchRun.read(self.folder)
        if before is None:
            self.run.write(self.folder)
            return 0
        refuse_other_options(self.folder, before, self.run.options)
        self._refuse_other_surroundings(before)
        files = [_MethodFile.read(self.folder / _results_file(method)) for method in self.run.methods]
        for file in files:
            file.refuse_other_questions(ids)
        shortest, longest = (choose(files, key=lambda file: len(file.answers)) for choose in (min, max))
        done = len(shortest.answers)
        if len(longest.answers) - done > 1:
            raise ResultError(
                f"{shortest.path} holds {done} answers, {longest.path.name} holds {len(longest.answers)}, and a kill "
                "leaves a difference of 1 at most: restore the file from a copy, or choose another --out"
            )
        for file in files:
            file.cut(done)
        return done

    def _refuse_other_surroundings(self, before: BenchRun) -> None:
        for name, now in self.run.surroundings.items():
            then = before.surroundings.get(name)
            if then != now:
                change = "other stores" if name == "stores" else f"{name.replace('_', ' ')} {then}, not {now}"
                raise ResultError(
                    f"{self.folder} was begun with {change}, results would not compare: {CHOOSE_ANOTHER_FOLDER}"
                )


@dataclass(frozen=True)
class _MethodFile:
    """Answer file of one method."""

    path: Path
    answers: list[AnsweredQuestion]
    last: bytes
    """Last complete line, including its newline."""
    torn: bytes

    @classmethod
    def read(cls, path: Path) -> _MethodFile:
        answers: list[AnsweredQuestion] = []
        last = b""
        for number, line in enumerate(read_lines(path), start=1):
            if is_torn(line):
                return cls(path, answers, last, line)
            try:
                answers.append(AnsweredQuestion.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError):
                raise ResultError(
                    f"{path}:{number} is not an answer of hdtool bench: {CHOOSE_ANOTHER_FOLDER}"
                ) from None
            last = line
        return cls(path, answers, last, b"")

    def refuse_other_questions(self, ids: Sequence[int | str]) -> None:
        """Raise ResultError unless the lines, including a torn line, answer the first questions of ``ids`` in order."""
        done = len(self.answers)
        if [answer.question_id for answer in self.answers] != list(ids[:done]):
            raise ResultError(f"{self.path} does not hold the questions in their order: {CHOOSE_ANOTHER_FOLDER}")
        fits = not self.torn
        if self.torn and done < len(ids):
            start = json.dumps({"question_id": ids[done]}, ensure_ascii=False)[:-1] + ', "category": "'
            fits = may_be_torn_start(self.torn, start)
        if not fits:
            raise ResultError(
                f"{self.path}:{done + 1} is cut short and is not an answer of hdtool bench to question {done + 1}: "
                "remove that line, or choose another --out"
            )

    def cut(self, done: int) -> None:
        """Remove the torn last line, if any, and the last answer if the file holds more than ``done`` answers."""
        cut_torn_line(self.path, (self.last if len(self.answers) > done else b"") + self.torn)


def _results_file(method: str) -> str:
    return f"{method}.jsonl"


def _json_text(value: object) -> str:
    return "none" if value is None else ",".join(value) if isinstance(value, list | tuple) else f"{value}"
