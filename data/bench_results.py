"""A folder of results: the settings of a run, and one file of JSON lines per method with its answers.

A question is done when every file has its line. Lines are on disk before the next question starts. A kill leaves
files that differ by at most one question, and a torn line; a resumed run cuts those lines off. Files that differ
by more were changed by another program and are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.errors import ResultError, worded
from hdtool.data.kept_records import append, cut, exclusive, is_torn, lines_of, may_be_torn_from
from hdtool.data.output_files import OutputFile, json_with

FORMAT = 1
RUN = "run.json"
ELSEWHERE = "choose another --out, or move that folder away to start again"


@dataclass(frozen=True)
class Run:
    """The settings and the environment of a run."""

    options: dict[str, Any]
    """Answers of runs with different options are never mixed."""
    methods: tuple[str, ...]
    questions: int
    surroundings: dict[str, Any] = field(default_factory=dict)
    started: str = ""

    @classmethod
    def read(cls, folder: Path) -> Run | None:
        """The run in a folder; None if there is none."""
        path = folder / RUN
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            found = row.pop("format")
            if found != FORMAT:
                raise ResultError(f"{path} has format {found}, this hdtool reads {FORMAT}: {ELSEWHERE}")
            return cls(**{**row, "methods": tuple(row["methods"])})
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ResultError(f"{path} cannot be read ({error.strerror or error}): choose another --out") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ResultError(f"{path} is not a run of hdtool bench: {ELSEWHERE}") from None

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"
        is_run = json_with(("options", "methods", "questions"), FORMAT)
        OutputFile(folder / RUN, "a run of hdtool bench", is_run, ResultError, ELSEWHERE).write(text)


@dataclass(frozen=True)
class Results:
    """A run and the answers to the questions that every method has answered, in the order of the questions."""

    run: Run
    answers: dict[str, list[AnsweredQuestion]]

    @property
    def complete(self) -> bool:
        return all(len(answers) == self.run.questions for answers in self.answers.values())


def read_results(folder: Path) -> Results:
    """The results in a folder; the run may be incomplete."""
    run = Run.read(folder)
    if run is None:
        raise ResultError(f"{folder} holds no results: make some with hdtool bench --out {folder}")
    answers = {method: _MethodFile.read(folder / _file(method)).answers for method in run.methods}
    shared = min(map(len, answers.values()))
    return Results(run, {method: rows[:shared] for method, rows in answers.items()})


def refuse_other_options(folder: Path, run: Run, options: Mapping[str, Any]) -> None:
    """Raise unless a run was started with these options."""
    for name, wanted in options.items():
        if name not in run.options:
            option = f"--{name.replace('_', '-')}"
            raise ResultError(f"{folder} holds an incomplete run of an hdtool without {option}: {ELSEWHERE}")
        found = run.options.get(name)
        if found != wanted:
            if name == "questions":
                raise ResultError(f"{folder} holds a run over other questions: {ELSEWHERE}")
            option = f"{name.replace('_', '-')} {_formatted(found)}, not {_formatted(wanted)}"
            raise ResultError(f"{folder} holds a run with {option}: {ELSEWHERE}")


def refuse_files_without_run(folder: Path, methods: Collection[str]) -> None:
    """Raise if there are files of answers but no run."""
    if Run.read(folder) is None:
        for path in (folder / _file(method) for method in methods):
            if os.path.lexists(path):
                raise ResultError(f"{path} exists, but {RUN} does not: choose another --out")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder of results for this process."""
    busy = ResultError(f"another bench is writing {folder}: wait for it, or choose another --out")
    advice = "answers in it are kept; make room or choose another --out, and run the command again"
    with worded(ResultError, f"{folder} cannot be written", advice):
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock", busy):
            yield


class ResultFolder:
    """Writes answers into a locked folder."""

    def __init__(self, folder: Path, run: Run, ids: Sequence[int | str]) -> None:
        """Resume a run with the same settings, or start one; ``ids`` are those of all questions."""
        self.folder = folder
        self.run = run
        self.answered = self._resume(ids)
        """The number of questions that every method has answered."""

    def add(self, answers: Mapping[str, AnsweredQuestion]) -> None:
        """One question, answered by every method."""
        for method, answer in answers.items():
            append(self.folder / _file(method), answer.to_json(f"{self.run.surroundings['model']}-{method}"))
        self.answered += 1

    def _resume(self, ids: Sequence[int | str]) -> int:
        refuse_files_without_run(self.folder, self.run.methods)
        before = Run.read(self.folder)
        if before is None:
            self.run.write(self.folder)
            return 0
        refuse_other_options(self.folder, before, self.run.options)
        self._refuse_other_surroundings(before)
        files = [_MethodFile.read(self.folder / _file(method)) for method in self.run.methods]
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

    def _refuse_other_surroundings(self, before: Run) -> None:
        for name, now in self.run.surroundings.items():
            then = before.surroundings.get(name)
            if then != now:
                change = "other stores" if name == "stores" else f"{name.replace('_', ' ')} {then}, not {now}"
                raise ResultError(f"{self.folder} was begun with {change}, results would not compare: {ELSEWHERE}")


@dataclass(frozen=True)
class _MethodFile:
    """The file of one method's answers."""

    path: Path
    answers: list[AnsweredQuestion]
    last: bytes
    """The last whole line."""
    torn: bytes

    @classmethod
    def read(cls, path: Path) -> _MethodFile:
        answers: list[AnsweredQuestion] = []
        last = b""
        for number, line in enumerate(lines_of(path), start=1):
            if is_torn(line):
                return cls(path, answers, last, line)
            try:
                answers.append(AnsweredQuestion.from_json(json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError):
                raise ResultError(f"{path}:{number} is not an answer of hdtool bench: {ELSEWHERE}") from None
            last = line
        return cls(path, answers, last, b"")

    def refuse_other_questions(self, ids: Sequence[int | str]) -> None:
        """Raise unless the lines, with the torn one, answer the first of these questions."""
        done = len(self.answers)
        if [answer.question_id for answer in self.answers] != list(ids[:done]):
            raise ResultError(f"{self.path} does not hold the questions in their order: {ELSEWHERE}")
        fits = not self.torn
        if self.torn and done < len(ids):
            start = json.dumps({"question_id": ids[done]}, ensure_ascii=False)[:-1] + ', "category": "'
            fits = may_be_torn_from(self.torn, start)
        if not fits:
            raise ResultError(
                f"{self.path}:{done + 1} is cut short and is not an answer of hdtool bench to question {done + 1}: "
                "remove that line, or choose another --out"
            )

    def cut(self, done: int) -> None:
        """Keep the answers to ``done`` questions: all in the file, or all but the last."""
        cut(self.path, (self.last if len(self.answers) > done else b"") + self.torn)


def _file(method: str) -> str:
    return f"{method}.jsonl"


def _formatted(value: object) -> str:
    return "none" if value is None else ",".join(value) if isinstance(value, list | tuple) else f"{value}"
