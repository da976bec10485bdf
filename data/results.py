"""A folder of results: what was run, and the answers of each method, a file of JSON lines for each.

A question is there when every file has its line. Lines are on disk before the next question is asked;
what a kill left incomplete is taken away when the work goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hdtool.data.answered import AnsweredQuestion
from hdtool.data.errors import ResultError

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
        beside = folder / f".{RUN}"
        beside.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1, ensure_ascii=False) + "\n", "utf-8")
        beside.replace(folder / RUN)


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
    answers = {method: [row for row, _ in _whole_lines(folder / _file(method))] for method in run.methods}
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


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """A folder for results, for this process alone."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ResultError(f"another bench is writing {folder}: wait for it, or choose another --out") from None
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
            model_id = f"{self.run.surroundings['model']}-{method}"
            line = json.dumps(answer.to_json(model_id), ensure_ascii=False) + "\n"
            with open(self.folder / _file(method), "ab") as stream:
                stream.write(line.encode())
                stream.flush()
                os.fsync(stream.fileno())
        self.answered += 1

    def _resume(self, ids: Sequence[int | str]) -> int:
        paths = [self.folder / _file(method) for method in self.run.methods]
        before = Run.read(self.folder)
        if before is None:
            if foreign := [path for path in paths if path.exists()]:
                raise ResultError(f"{foreign[0]} is there, but no {RUN} beside it: choose another --out")
            self.run.write(self.folder)
            return 0
        refuse_other_options(self.folder, before, self.run.options)
        self._refuse_other_surroundings(before)
        written = [list(_whole_lines(path)) for path in paths]
        done = min(map(len, written))
        for path, rows in zip(paths, written, strict=True):
            if [row.question_id for row, _ in rows[:done]] != list(ids[:done]):
                raise ResultError(f"{path} does not hold the questions in their order: {ELSEWHERE}")
            if path.exists():
                os.truncate(path, rows[done - 1][1] if done else 0)
        return done

    def _refuse_other_surroundings(self, before: Run) -> None:
        for name, now in self.run.surroundings.items():
            then = before.surroundings.get(name)
            if then != now:
                told = "other stores" if name == "stores" else f"{name.replace('_', ' ')} {then}, not {now}"
                raise ResultError(f"{self.folder} was begun with {told}, figures would not compare: {ELSEWHERE}")


def _whole_lines(path: Path) -> Iterator[tuple[AnsweredQuestion, int]]:
    """The answers in a file, each with the place where its line ends; a last line cut short is left out."""
    if not path.exists():
        return
    place = 0
    with open(path, "rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.endswith(b"\n"):
                return
            place += len(line)
            try:
                answer = AnsweredQuestion.from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError):
                raise ResultError(f"{path}:{number} is no answer of hdtool bench: {ELSEWHERE}") from None
            yield answer, place


def _file(method: str) -> str:
    return f"{method}.jsonl"


def _told(value: object) -> str:
    return "none" if value is None else ",".join(value) if isinstance(value, list | tuple) else f"{value}"
