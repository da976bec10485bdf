"""Work folder of a set-up, which keeps stage results so that the same command resumes.

It holds copies of logged conversations, so only its owner can read it. Also answers the held-out prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import IO, Any, NamedTuple

from hdtool.builders.evaluation.bench import Bench
from hdtool.builders.evaluation.bench_plan import ContenderFactory, warm_up_questions
from hdtool.builders.evaluation.contenders import Contender, DraftingContender
from hdtool.builders.evaluation.scores import mean_speed
from hdtool.builders.evaluation.verify import Verifier
from hdtool.builders.setup.candidates import method_options, usable_drafter_methods, with_model_drafters
from hdtool.data.chat import encode_conversation
from hdtool.data.conversation import USER, Conversation
from hdtool.data.conversation_shapes import AnsweredQuestion
from hdtool.data.durable_files import file_lock
from hdtool.data.errors import PromptError, RecordError, ResultError, os_errors_as
from hdtool.data.output_files import (
    O_BINARY,
    O_NOFOLLOW,
    OutputFile,
    is_json_with,
    json_object,
    sync_to_disk,
    temporary_names,
)
from hdtool.data.prompts import Prompt
from hdtool.data.stores.home import SHOWN_FINGERPRINT_DIGITS, StoredItem, home, remove_empty, setups_at_home
from hdtool.data.stores.manifest import Checkpoint, InputShare
from hdtool.data.stores.store import recorded_name
from hdtool.data.stores.store_files import LOCK_FILE as STORE_LOCK, MANIFEST, delete_leftovers, is_regular
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.config.building import MAX_HELD_OUT
from hdtool.runtime.config.model import INT8
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.stores.store_set import StoreSet


def opening_hash(conversation: Conversation) -> bytes:
    """Return a hash of the first question, ignoring case and whitespace."""
    question = next((turn.text for turn in conversation.turns if turn.role == USER), "")
    return hashlib.sha256(" ".join(question.lower().split()).encode("utf-8", "surrogatepass")).digest()


def choose_held_out(openings: Sequence[bytes], share: float) -> frozenset[bytes]:
    """Choose conversations to hold out, about ``share`` of them, by hash; return their opening hashes.

    Conversations with the same opening are never split, because their answers resemble each other. The choice does not
    depend on the order of the logs.
    """
    if not openings:
        raise RecordError(
            "the logs hold no answers of a model: collect the model's answers to their questions with hdtool collect"
        )
    counts = Counter(openings)
    if len(counts) < 2:
        raise RecordError(
            f"all {len(openings)} conversations in the logs begin with the same question, and setup holds others out "
            "of the stores to measure with: name more logs"
        )
    left = min(MAX_HELD_OUT, math.ceil(share * len(openings)))
    chosen = set()
    for opening in sorted(counts)[:-1]:  # never hold out the last one
        if left <= 0:
            break
        chosen.add(opening)
        left -= counts[opening]
    return frozenset(chosen)


SETUP_FORMAT = 2
RESULTS_FILE, HELD_OUT_FILE, COST_FILE, HALF_STORE = "setup.json", "held-out.jsonl", "cost.json", "half"
SETUP_LOCK = "lock"
SETUP_KIND = "setup"
"""Kind under which ``hdtool stores`` lists set-ups."""
WRITE_ADVICE = "make room, correct the permissions, or set HDTOOL_HOME to another folder"
SETUP_FILES = re.compile(r"setup\.json|held-out\.jsonl|cost\.json|learned(-[0-9]+)?\.jsonl")
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


class LearnedPart(NamedTuple):
    """Conversations of one log that the stores are built from."""

    log: str
    """Name of the log, as the user typed it."""
    file: str
    """Name of the copy in the work folder."""
    conversations: int


class WorkFolder:
    """Files of one set-up: stage results, both parts of the logs, and the cost curve of forward passes."""

    def __init__(self, model: str, identity: Sequence[str], logs: Sequence[str] = ()) -> None:
        """``identity`` is everything that the split of the logs depends on; it selects the folder."""
        parts = "\n".join([str(SETUP_FORMAT), *identity])
        digest = hashlib.sha256(parts.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.path = setups_at_home(model) / digest
        self.held_out, self.cost = self.path / HELD_OUT_FILE, self.path / COST_FILE
        self.half = self.path / HALF_STORE
        """Temporary store of half of the answers, for the learning curve."""
        self._file = _results_file(self.path)
        self._about = {"model": recorded_name(model), "logs": [recorded_name(log) for log in logs]}
        self.stages: dict[str, dict[str, Any]] = {}
        self._conditions: dict[str, list[str]] = {}
        """Conditions under which each measurement was made."""

    def load(self) -> None:
        """Read the results of finished stages, if any."""
        with os_errors_as(ResultError, f"{self.path} cannot be read", WRITE_ADVICE):
            if self._file.exists():
                record = json_object(self._file.path)
                self.stages, self._conditions = record["stages"], record.get("conditions", {})

    @contextmanager
    def opened(self) -> Iterator[WorkFolder]:
        """Lock the folder, create it if needed, and read its results."""
        busy = ResultError(f"another setup of these logs is running in {self.path}: wait for it")
        with ExitStack() as held:
            with os_errors_as(ResultError, f"{self.path} cannot be written", WRITE_ADVICE):
                _make_private(self.path)
                held.enter_context(file_lock(self.path / SETUP_LOCK, busy))
            self.load()
            if not self._file.exists():  # hdtool stores finds the folder by this file
                self._write()
            yield self

    @property
    def learned(self) -> list[LearnedPart]:
        """Parts of the logs that the stores are built from; empty before the logs were read."""
        return [LearnedPart(*part) for part in self.stages.get("read", {}).get("learned", ())]

    @property
    def learned_files(self) -> list[Path]:
        return [self.path / part.file for part in self.learned]

    @contextmanager
    def writing_learned(self) -> Iterator[Callable[[int, bytes], None]]:
        """Yield a function that appends a line to the part of log ``log``; deletes earlier parts first."""
        written: set[Path] = set()
        current: list[tuple[Path, IO[bytes]]] = []

        def write(log: int, line: bytes) -> None:
            path = self.path / learned_name(log)
            if not current or current[0][0] != path:
                close()
                flags = os.O_WRONLY | os.O_APPEND | O_NOFOLLOW | O_BINARY
                created = 0 if path in written else os.O_CREAT | os.O_EXCL
                current.append((path, os.fdopen(os.open(path, flags | created, PRIVATE_FILE), "ab")))
                written.add(path)
            current[0][1].write(line)

        def close() -> None:
            for _, stream in current:
                stream.close()
            current.clear()

        with os_errors_as(ResultError, f"{self.path} cannot be written", WRITE_ADVICE):
            for path in self.path.glob("learned-*.jsonl"):
                if SETUP_FILES.fullmatch(path.name) and is_regular(path):
                    path.unlink()
            try:
                yield write
            finally:
                close()
            for path in written:
                sync_to_disk(path)

    def remove_half(self) -> None:
        _remove_half(self.half)

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record that a stage is done, with the results that later stages and the verdict need."""
        self.stages[stage] = result
        self._write()

    def forget(self, *stages: str) -> None:
        """Discard the results of stages, so that they run again."""
        if self.stages.keys() & set(stages):
            self.stages = {name: result for name, result in self.stages.items() if name not in stages}
            self._write()

    def outdated(self, conditions: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the measurements that were made under other conditions."""
        return [stage for stage, now in conditions.items() if self._conditions.get(stage) != list(now)]

    def keep_measurements(self, conditions: Mapping[str, Sequence[str]]) -> None:
        """Discard measurements made under other conditions, and record ``conditions`` for the next ones."""
        changed = self.outdated(conditions)
        self._conditions = {stage: list(now) for stage, now in conditions.items()}
        self.forget(*changed)

    def _write(self) -> None:
        row = {"format": SETUP_FORMAT, **self._about, "conditions": self._conditions, "stages": self.stages}
        self._file.write(json.dumps(row, indent=1, ensure_ascii=False) + "\n")


def learned_name(log: int) -> str:
    """Return the name of the file with the learned part of log ``log``."""
    return f"learned-{log}.jsonl"


def _results_file(folder: Path) -> OutputFile:
    return OutputFile(
        folder / RESULTS_FILE,
        "the results of a set-up",
        is_json_with(("stages",), SETUP_FORMAT),
        ResultError,
        WRITE_ADVICE,
        private=True,
    )


def _make_private(folder: Path) -> None:
    """Create the folder and its two parents with access for the owner only, and restrict existing ones."""
    places = [folder, folder.parent, folder.parent.parent]
    for place in reversed(places):
        place.mkdir(PRIVATE_FOLDER, parents=True, exist_ok=True)
        if place.stat().st_mode & 0o077:
            place.chmod(PRIVATE_FOLDER)


def kept_setups() -> list[StoredItem]:
    """Return the work folders in hdtool's home, as ``hdtool stores`` lists them."""
    folders = sorted(path.parent for path in home().glob(f"setups/*/*/{RESULTS_FILE}") if is_regular(path))
    return [
        _item(folder, record)
        for folder in folders
        if {"format", "stages"} <= (record := json_object(folder / RESULTS_FILE)).keys()
    ]


def _item(folder: Path, record: Mapping[str, Any]) -> StoredItem:
    learned: dict[str, int] = {}
    with suppress(AttributeError, LookupError, TypeError, ValueError):  # list the folder even if its file is malformed
        learned = {log: number for log, _, number in record["stages"]["read"]["learned"]}
    named = record.get("logs")
    logs = named if isinstance(named, list) else []
    return StoredItem(
        f"{SETUP_KIND}-{folder.name[:SHOWN_FINGERPRINT_DIGITS]}",
        SETUP_KIND,
        folder,
        (folder / RESULTS_FILE).stat().st_mtime,
        sum(path.stat().st_size for path in _files(folder)),
        model=Checkpoint("", str(record.get("model", folder.parent.name))),
        sources=tuple(InputShare(str(log), "", learned.get(str(log), 0), 0) for log in logs),
    )


def remove_setup(item: StoredItem) -> None:
    """Delete the files of a set-up, and its folder if nothing else is in it."""
    folder = item.folder
    with os_errors_as(ResultError, f"{folder} cannot be removed", "correct the permissions"):
        with file_lock(folder / SETUP_LOCK, ResultError(f"a setup is running in {folder}: wait for it")):
            _remove_half(folder / HALF_STORE)
            # Delete the results file last, so that a killed removal can be found and repeated.
            for path in sorted(_files(folder), key=lambda path: path.name == RESULTS_FILE):
                path.unlink(missing_ok=True)
        (folder / SETUP_LOCK).unlink(missing_ok=True)
        remove_empty(folder)


def _files(folder: Path) -> list[Path]:
    """Return the files of a set-up, including temporary ones left by a killed process."""
    stale = temporary_names(SETUP_FILES.pattern)
    return [
        path
        for path in folder.iterdir()
        if (SETUP_FILES.fullmatch(path.name) or stale.fullmatch(path.name)) and is_regular(path)
    ]


def _remove_half(folder: Path) -> None:
    if not folder.is_dir() or folder.is_symlink():
        return
    for name in (MANIFEST, STORE_LOCK):
        if is_regular(folder / name):
            (folder / name).unlink()
    delete_leftovers(folder, ())
    with suppress(OSError):
        folder.rmdir()


PLAIN_NAME, DRAFTED_NAME, GENERATE_NAME = "ar", "hd", "generate"
PLAIN_SECONDS = 40.0
"""Approximate time, in seconds, that plain decoding of the chosen prompts should take."""
MIN_PROMPTS, MAX_PROMPTS, MAX_GENERATE_PROMPTS = 3, 24, 4
"""Limits for the number of prompts; transformers answers fewer because it is several times slower."""


def number_of_prompts(max_new_tokens: int, plain_tokens_per_second: float) -> int:
    """Return the number of prompts that plain decoding answers in about ``PLAIN_SECONDS``."""
    return max(MIN_PROMPTS, min(MAX_PROMPTS, int(PLAIN_SECONDS * plain_tokens_per_second / max_new_tokens)))


def answer_prompts(
    loaded: Loaded,
    store_set: StoreSet,
    model: ModelConfig,
    prompts: Sequence[Prompt],
    most_prompts: int,
    max_new_tokens: int,
    chat: bool | None,
    on_progress: Callable[[int], None],
    folder: Path | None = None,
) -> dict[str, Any]:
    """Answer the first prompts that fit the model's context with each method; return speeds and comparisons.

    Every answer uses a fresh drafter. ``generate`` of transformers answers only a few prompts. Trained drafters that
    lie in the model's ``folder`` or are layers of its checkpoint take part too.
    """
    decoding = with_model_drafters(DecodeConfig(max_new_tokens=max_new_tokens), loaded, folder)
    offered = usable_drafter_methods(decoding, loaded)
    names = (GENERATE_NAME, PLAIN_NAME, DRAFTED_NAME, *offered)
    contenders = ContenderFactory(loaded, store_set, model, decoding, SamplingConfig()).contenders(names)
    bench = Bench(loaded, contenders, max_new_tokens, chat)
    questions = [prompt for prompt in prompts if bench.fits(prompt)][:most_prompts]
    if not questions:
        raise PromptError("no held-out conversation fits the model's context: name logs of shorter ones")
    bench.warm_up(warm_up_questions(questions, (), 1, bench.fits))
    without_generate = replace(
        bench, contenders={name: contender for name, contender in contenders.items() if name != GENERATE_NAME}
    )
    answers: list[dict[str, AnsweredQuestion]] = []
    for answered in chain(
        bench.answers(questions[:MAX_GENERATE_PROMPTS]), without_generate.answers(questions, done=MAX_GENERATE_PROMPTS)
    ):
        answers.append(answered)
        on_progress(len(answers))
    compared = tuple(name for name in contenders if name != GENERATE_NAME or model.activations != INT8)
    different = [
        prompt for prompt, by_method in zip(questions, answers, strict=True) if not _is_identical(by_method, compared)
    ]
    drafting = [contender for name, contender in contenders.items() if name in (DRAFTED_NAME, *offered)]
    return {
        "tokens_per_second": {
            name: mean_speed([by_method[name] for by_method in answers if name in by_method]) for name in contenders
        },
        "tokens_per_step": _tokens_per_step(answers, DRAFTED_NAME),
        "offered": {
            name: {
                "tokens_per_step": _tokens_per_step(answers, name),
                "options": list(method_options(name, decoding)),
            }
            for name in offered
        },
        "prompts": len(questions),
        # Prompts for which all methods gave the same tokens. With 8-bit activations, transformers is not compared,
        # because it does not round them.
        "identical": len(questions) - len(different),
        # Other prompts whose differences are explained by rounding.
        "near_ties": sum(_is_near_tie(loaded, drafting, prompt, max_new_tokens, chat) for prompt in different),
    }


def _tokens_per_step(answers: Sequence[dict[str, AnsweredQuestion]], name: str) -> float:
    return fmean(tokens for by_method in answers for tokens in by_method[name].step_tokens)


def _is_identical(by_method: dict[str, AnsweredQuestion], compared: Sequence[str]) -> bool:
    first, *others = (by_method[method].output_ids for method in compared if method in by_method)
    return all(other == first for other in others)


def _is_near_tie(
    loaded: Loaded, drafting: Sequence[Contender], prompt: Prompt, max_new_tokens: int, chat: bool | None
) -> bool:
    """Return True if rounding explains every difference between the methods."""
    ids = encode_conversation(loaded.tokenizer, prompt.messages, chat=chat, tools=prompt.tools)
    for contender in drafting:
        assert isinstance(contender, DraftingContender)
        verifier = Verifier(loaded, SamplingConfig(), contender.new_drafter(), max_new_tokens)
        check = verifier.check(prompt.id, ids, prompt.grammar)
        if not all(explanation.near_tie for explanation in verifier.explain(check.differences)):
            return False
    return True
