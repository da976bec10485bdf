"""A folder of results: what was run, and the answers of each method, a file of JSON lines for each.

A question is there when every file has its line. Lines are on disk before the next question is asked. A kill
leaves files that differ by one question at most, and a torn line; when the work goes on, those lines are cut off.
Files that differ by more were changed by somebody else, so they are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hdtool.data.errors import ResultError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.json_lines import append, cut, is_torn, lines_of, may_be_torn_from
from hdtool.data.files.locking import exclusive
from hdtool.data.files.ownership import json_with
from hdtool.data.spec_bench import AnsweredQuestion

FORMAT = 1
RUN = "run.json"
ELSEWHERE = "choose another --out, or take that folder away to start anew"


@dataclass(frozen=True)
class Run:
    """What was run, on what."""

    options: dict[str, Any]
    """As they were asked for; answers of other options are never mixed with these."""
    methods: tuple[str, ...]
    questions: int
    surroundings: dict[str, Any] = field(default_factory=dict)
    started: str = ""

    @classmethod
    def read(cls, folder: Path) -> Run | None:
        """The run of a folder, None if there is none yet."""
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
            raise ResultError(f"{path} is no run of hdtool bench: {ELSEWHERE}") from None

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"
        is_run = json_with(("options", "methods", "questions"), FORMAT)
        OutputFile(folder / RUN, "a run of hdtool bench", is_run, ResultError, ELSEWHERE).write(text)


@dataclass(frozen=True)
class Results:
    """A run and the answers to its questions, as far as every method has given them; in the questions' order."""

    run: Run
    answers: dict[str, list[AnsweredQuestion]]

    @property
    def complete(self) -> bool:
        return all(len(answers) == self.run.questions for answers in self.answers.values())


def read_results(folder: Path) -> Results:
    """The results in a folder, of a run that is complete or not."""
    run = Run.read(folder)
    if run is None:
        raise ResultError(f"{folder} holds no results: make some with hdtool bench --out {folder}")
    answers = {method: _MethodFile.read(folder / _file(method)).answers for method in run.methods}
    shared = min(map(len, answers.values()))
    return Results(run, {method: rows[:shared] for method, rows in answers.items()})


def refuse_other_options(folder: Path, run: Run, options: Mapping[str, Any]) -> None:
    """Raise unless a run was started with these very options."""
    for name, wanted in options.items():
        found = run.options.get(name)
        if found != wanted:
            told = name.replace("_", "-")
            if name == "questions":
                raise ResultError(f"{folder} holds a run over other questions: {ELSEWHERE}")
            raise ResultError(f"{folder} holds a run with {told} {_told(found)}, not {_told(wanted)}: {ELSEWHERE}")


def refuse_files_without_run(folder: Path, methods: Collection[str]) -> None:
    """Raise if answers would be appended to files that no run in this folder began."""
    if Run.read(folder) is None:
        for path in (folder / _file(method) for method in methods):
            if os.path.lexists(path):
                raise ResultError(f"{path} is there, but no {RUN} beside it: choose another --out")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for results, for this process alone."""
    busy = ResultError(f"another bench is writing {folder}: wait for it, or choose another --out")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with exclusive(folder / ".lock", busy):
            yield
    except OSError as error:
        raise ResultError(
            f"{folder} cannot be written ({error.strerror or error}): answers in it are kept; "
            "make room or choose another --out, and run the command again"
        ) from error


class ResultFolder:
    """Answers on their way to disk, into a locked folder."""

    def __init__(self, folder: Path, run: Run, ids: Sequence[int | str]) -> None:
        """Goes on where a run of the same settings was; ``ids`` are those of all questions."""
        self.folder = folder
        self.run = run
        self.answered = self._resume(ids)
        """Questions that every method has answered."""

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
                told = "other stores" if name == "stores" else f"{name.replace('_', ' ')} {then}, not {now}"
                raise ResultError(f"{self.folder} was begun with {told}, figures would not compare: {ELSEWHERE}")


@dataclass(frozen=True)
class _MethodFile:
    """The answers of one method on disk."""

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
                raise ResultError(f"{path}:{number} is no answer of hdtool bench: {ELSEWHERE}") from None
            last = line
        return cls(path, answers, last, b"")

    def refuse_other_questions(self, ids: Sequence[int | str]) -> None:
        """Raise unless the lines answer the first of these questions, the torn line included."""
        done = len(self.answers)
        if [answer.question_id for answer in self.answers] != list(ids[:done]):
            raise ResultError(f"{self.path} does not hold the questions in their order: {ELSEWHERE}")
        if self.torn and not (done < len(ids) and may_be_torn_from(self.torn, _start_of_line(ids[done]))):
            raise ResultError(
                f"{self.path}:{done + 1} is cut short and is no answer of hdtool bench to question {done + 1}: "
                "remove that line, or choose another --out"
            )

    def cut(self, done: int) -> None:
        """Keep the answers to so many questions, which are all or all but one of those here."""
        cut(self.path, (self.last if len(self.answers) > done else b"") + self.torn)


def _start_of_line(question_id: int | str) -> str:
    """What a line with the answer to a question begins with."""
    return json.dumps({"question_id": question_id}, ensure_ascii=False)[:-1] + ', "category": "'


def _file(method: str) -> str:
    return f"{method}.jsonl"


def _told(value: object) -> str:
    return "none" if value is None else ",".join(value) if isinstance(value, list | tuple) else f"{value}"
