"""A model's own answers, collected: one line of JSON for each prompt, resumable after a kill.

A line is whole or it is not there: each one is on disk before the next is begun, and a line that a kill
cut short is taken away when the work goes on. Lines stand in the order of the prompts, so answers that are
made beside a longer one wait for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt
from hdtool.runtime.answer import Answer
from hdtool.runtime.answers import Answerer


class GenerationFile:
    """Answers on disk, in the order of their prompts."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path = path
        self._settings = settings

    @contextmanager
    def open(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
        """Take the file for this process alone; the prompts that it lacks are what is left to do."""
        from filelock import FileLock, Timeout

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_name(f".{self.path.name}.lock"), timeout=0):
                done = self._resume(prompts)
                with open(self.path, "ab") as self._stream:
                    yield prompts[done:]
        except Timeout:
            raise PromptError(f"another collect is writing {self.path}: wait for it, or choose another --out") from None
        except OSError as error:
            raise PromptError(
                f"{self.path} cannot be written ({error.strerror or error}): the answers in it are kept; "
                "make room or choose another --out, and run the command again"
            ) from error

    def add(self, prompt: Prompt, told: Sequence[Answer]) -> None:
        """A prompt, answered to the last turn."""
        conversation = [dict(message) for message in prompt.messages]
        for number, answer in enumerate(told):
            if number:
                conversation.append({"role": "user", "content": answer.asked})
            conversation.append({"role": "assistant", "content": answer.text})
        answers = [{"output_ids": answer.output_ids, "finish": answer.stats.finish} for answer in told]
        row = {"id": prompt.id, "category": prompt.category, **self._settings}
        line = json.dumps({**row, "messages": conversation, "answers": answers}, ensure_ascii=False) + "\n"
        self._stream.write(line.encode())
        self._stream.flush()
        os.fsync(self._stream.fileno())

    def _resume(self, prompts: Sequence[Prompt]) -> int:
        """How many prompts are answered; a line cut short is dropped, and foreign ones are refused."""
        if not self.path.exists():
            return 0
        whole, done = 0, 0
        with open(self.path, "rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._check(line, done, prompts)
                whole, done = whole + len(line), done + 1
        os.truncate(self.path, whole)
        return done

    def _check(self, line: bytes, number: int, prompts: Sequence[Prompt]) -> None:
        where = f"{self.path}:{number + 1}"
        try:
            row = json.loads(line)
            known = {name: row[name] for name in self._settings}
            asked = tuple(row["messages"][: len(prompts[number].messages)]) if number < len(prompts) else None
        except (ValueError, KeyError, TypeError):
            raise PromptError(f"{where} is no line of collect: choose another --out, or take the file away") from None
        if asked is None or asked != prompts[number].messages:
            raise PromptError(
                f"{where} answers another prompt than the file of prompts has there: choose another --out"
            )
        for name, wanted in self._settings.items():
            if known[name] != wanted:
                raise PromptError(f"{where} was answered with {name} {known[name]}, not {wanted}: choose another --out")


def collect(answerer: Answerer, prompts: Sequence[Prompt], file: GenerationFile) -> Iterator[int]:
    """Ask every prompt that the file lacks and add its answers; yields how many are answered by now."""
    with file.open(prompts) as left:
        done = len(prompts) - len(left)
        yield done
        told: list[Answer] = []
        for answer in answerer.all_answers(left):
            for _ in answer:
                pass
            if answer.interrupted:  # what was cut short is not the model's answer
                raise KeyboardInterrupt
            told.append(answer)
            if len(told) > len(answer.prompt.later_turns):
                file.add(answer.prompt, told)
                told, done = [], done + 1
                yield done
