"""Collects a model's answers as one JSON line per prompt; a killed run can be resumed.

Lines are flushed to disk one by one, in prompt order. If a kill cut the last line short, its prompt is answered again.
A file that holds anything other than answers to the prompts is refused and left unchanged.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hdtool.data.conversation import RecordedRankings
from hdtool.data.durable_files import (
    append_row,
    cut_torn_line,
    file_lock,
    is_torn,
    lock_path,
    may_be_torn_start,
    read_lines,
)
from hdtool.data.errors import PromptError, os_errors_as
from hdtool.data.prompts import GrammarKind, Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.answering.streamed_answer import Answer
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import recorded_settings


class GenerationFile:
    """JSON Lines file that holds the answers to prompts, in prompt order."""

    def __init__(
        self,
        path: Path,
        model: ModelConfig,
        decoding: DecodeConfig,
        sampling: SamplingConfig,
        chat: bool | None = None,
        rankings: int = 0,
    ) -> None:
        """``rankings`` is the number of the target's top tokens to record per position; 0 records none.

        Lines hold the model's name, temperature, seed and ``max_new_tokens``, and other settings that are not defaults.
        """
        self.path = path
        self._defaults = recorded_settings(ModelConfig(), SamplingConfig()) | {"chat": None, "rankings": 0}
        settings = recorded_settings(model, sampling) | {"chat": chat, "rankings": rankings}
        self._settings = {
            "model": model.name,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "max_new_tokens": decoding.max_new_tokens,
        }
        self._settings |= {
            name: value
            for name, value in settings.items()
            if name not in self._settings and value != self._defaults[name]
        }

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise a ``PromptError`` unless line N answers prompt N with these settings; the file is not changed."""
        with self._errors_worded():
            self._read(prompts)

    @contextmanager
    def open(self, prompts: Sequence[Prompt]) -> Iterator[Sequence[Prompt]]:
        """Lock the file, cut off a torn last line, and yield the unanswered prompts; if locked, raise PromptError."""
        busy = PromptError(f"another collect is writing {self.path}: wait for it, or choose another --out")
        with self._errors_worded():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(lock_path(Path(os.path.realpath(self.path))), busy):
                done, torn = self._read(prompts)
                cut_torn_line(self.path, torn)
                self.path.open("ab").close()  # fails before the first answer if the file cannot be written
                yield prompts[done:]

    def _errors_worded(self) -> AbstractContextManager[None]:
        advice = "the answers in it are kept; make room or choose another --out, and run the command again"
        return os_errors_as(PromptError, f"{self.path} cannot be written", advice)

    def add(self, prompt: Prompt, given: Sequence[Answer]) -> None:
        """Append one line that holds the answers to all turns of a prompt."""
        conversation = prompt.conversation([answer.text for answer in given])
        answers = [_recorded(answer) for answer in given]
        append_row(self.path, {**self._asked(prompt), "messages": conversation, "answers": answers})

    def counts(self) -> tuple[int, int]:
        """Return ``(answers, tokens)``: how many answers the file holds, and how many tokens they have in total."""
        rows = (json.loads(line) for line in read_lines(self.path))
        lengths = [len(answer["output_ids"]) for row in rows for answer in row["answers"]]
        return len(lengths), sum(lengths)

    def _asked(self, prompt: Prompt) -> dict[str, Any]:
        return {"id": prompt.id, "category": prompt.category, **self._settings, **_grammar(prompt)}

    def _read(self, prompts: Sequence[Prompt]) -> tuple[int, bytes]:
        """Return ``(done, torn)``: number of answered prompts, and the last line if it was cut short, else ``b""``."""
        done = 0
        for line in read_lines(self.path):
            if is_torn(line):
                self._check_torn(line, done, prompts)
                return done, line
            self._check(line, done, prompts)
            done += 1
        return done, b""

    def _check_torn(self, torn: bytes, number: int, prompts: Sequence[Prompt]) -> None:
        """Raise a ``PromptError`` unless ``torn`` may be the beginning of the line for ``prompts[number]``."""
        if number < len(prompts):
            row = {**self._asked(prompts[number]), "messages": [dict(message) for message in prompts[number].messages]}
            if may_be_torn_start(torn, json.dumps(row, ensure_ascii=False).removesuffix("]}")):
                return
        raise PromptError(
            f"{self.path}:{number + 1} is cut short and is not an answer of collect to the prompt there: remove that "
            "line, or choose another --out"
        )

    def _check(self, line: bytes, number: int, prompts: Sequence[Prompt]) -> None:
        where = f"{self.path}:{number + 1}"
        try:
            row = json.loads(line)
            expected = {**self._defaults, **self._settings}
            known = {name: {**self._defaults, **row}[name] for name in expected}
            messages = tuple(row["messages"][: len(prompts[number].messages)]) if number < len(prompts) else None
        except (ValueError, KeyError, TypeError):
            raise PromptError(
                f"{where} is not a line of collect: choose another --out, or move the file away"
            ) from None
        if messages is None or messages != prompts[number].messages:
            raise PromptError(
                f"{where} answers a different prompt than the file of prompts has there: choose another --out"
            )
        if {kind.value: row[kind.value] for kind in GrammarKind if kind.value in row} != _grammar(prompts[number]):
            raise PromptError(f"{where} was answered under another grammar: choose another --out")
        for name, value in expected.items():
            if known[name] != value:
                raise PromptError(f"{where} was answered with {name} {known[name]}, not {value}: choose another --out")


def _grammar(prompt: Prompt) -> dict[str, Any]:
    """Return ``{kind: grammar}`` as in a prompts file, with JSON schemas parsed; empty if the prompt has no grammar."""
    if prompt.grammar is None:
        return {}
    kind, text = prompt.grammar.kind, prompt.grammar.text
    return {kind.value: json.loads(text) if kind is GrammarKind.JSON_SCHEMA else text}


def _recorded(answer: Answer) -> dict[str, Any]:
    recorded: dict[str, Any] = {"output_ids": answer.output_ids, "finish": answer.stats.finish}
    if isinstance(recorder := answer.request.observer, RankingRecorder):
        recorded["rankings"] = recorder.rankings.as_json()
    return recorded


class RankingRecorder:
    """Observes the steps of a request, and records the target's top tokens at each position of its answer."""

    def __init__(self, num_tokens: int) -> None:
        """``num_tokens`` is the number of tokens to record per position."""
        self._num_tokens = num_tokens
        self._tokens: list[np.ndarray] = []
        self._logprobs: list[np.ndarray] = []

    @property
    def rankings(self) -> RecordedRankings:
        return RecordedRankings(np.concatenate(self._tokens), np.concatenate(self._logprobs))

    def __call__(self, accepted: Accepted, verified: Verified) -> None:
        rows = verified.logits[accepted.rows].float()
        tokens, scores = topk(rows, min(self._num_tokens, rows.shape[-1]))
        self._tokens.append(tokens.astype(np.int32))
        self._logprobs.append(scores - rows.logsumexp(-1, keepdim=True).cpu().numpy())


def collect(answerer: Answerer, prompts: Sequence[Prompt], file: GenerationFile) -> Iterator[int]:
    """Add the answers that ``file`` lacks, yielding the number of answered prompts; Ctrl-C raises KeyboardInterrupt."""
    with file.open(prompts) as left:
        done = len(prompts) - len(left)
        yield done
        answers: list[Answer] = []
        for answer in answerer.all_answers(left):
            for _ in answer:
                pass
            if answer.interrupted:  # an incomplete answer is not recorded
                raise KeyboardInterrupt
            answers.append(answer)
            if len(answers) > len(answer.prompt.later_turns):
                file.add(answer.prompt, answers)
                answers, done = [], done + 1
                yield done
