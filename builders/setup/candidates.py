"""Stores of a set-up, replays of held-out conversations by source, and speed predictions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.builders.evaluation.contenders import answer_steps, timed
from hdtool.builders.evaluation.recording import RecordedTurn
from hdtool.builders.evaluation.replay import ReplayMethod, ReplayResult, SpeedPrediction
from hdtool.builders.evaluation.worker_pool import replay, total_turns
from hdtool.data.errors import HdtoolError, StoreError
from hdtool.data.progress import progress_bar
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store import FolderCheck, file_checksum, read_manifest
from hdtool.data.stores.store_files import MODEL_KIND, check_destination, holds_manifest
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import METHODS, DecodeConfig, SamplingConfig
from hdtool.runtime.config.decoding import (
    DRAFT_MODEL,
    HEADS_DRAFTER,
    HIERARCHIES,
    HISTORY_LETTER,
    MTP_DRAFTER,
    NO_HISTORY,
    SOURCE_NAMES,
)
from hdtool.runtime.drafter import NoDraft
from hdtool.runtime.drafters.heads.checkpoint import SETTINGS_FILE, read_settings
from hdtool.runtime.drafters.trained.proposal import SMALL_MODEL, PublishedDrafter
from hdtool.runtime.drafters.trained.select_drafter import methods_with_drafters, trained_drafter
from hdtool.runtime.environment import fingerprint
from hdtool.runtime.model.checks.trees import some_context
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.stores.store_set import StoreSet


def with_model_drafters(decoding: DecodeConfig, loaded: Loaded, folder: Path | None) -> DecodeConfig:
    """Return the settings with the trained heads and drafter found in the model's folder, if any."""
    target = fingerprint(loaded.target.model)
    heads, drafter = list[str](), decoding.drafter
    drafter_folders = (
        [folder_entry for folder_entry in sorted(folder.iterdir()) if (folder_entry / SETTINGS_FILE).is_file()]
        if folder
        else []
    )
    for folder_entry in drafter_folders:
        try:
            if read_settings(folder_entry)["target"] == target:
                heads.append(str(folder_entry))
            continue
        except HdtoolError:
            pass  # not a folder of heads
        try:
            if PublishedDrafter.named(str(folder_entry)).kind != SMALL_MODEL:
                drafter = drafter or str(folder_entry)
        except HdtoolError:
            continue
    return replace(decoding, heads=(*decoding.heads, *heads), drafter=drafter)


def usable_drafter_methods(decoding: DecodeConfig, loaded: Loaded) -> list[str]:
    """Return the hierarchies whose trained drafter is present and fits; print a note for each that does not fit."""
    methods = []
    tokenizer = TokenizerFingerprint.of(loaded.tokenizer)
    there = methods_with_drafters(decoding, loaded.target.model)
    for method in HIERARCHIES:
        if method not in there:
            continue
        try:
            trained_drafter(replace(decoding, method=method), loaded.target, tokenizer)
            methods.append(method)
        except HdtoolError as error:
            print(f"note: {method} is left out: {error}", file=sys.stderr)
    return methods


def method_options(method: str, decoding: DecodeConfig) -> tuple[str, ...]:
    """Return the command line options that select a method and its trained drafter."""
    kind = METHODS[method].trained
    heads = (
        [part for folder in decoding.heads for part in ("--heads", folder)]
        if kind in (HEADS_DRAFTER, MTP_DRAFTER)
        else []
    )
    drafter = ["--drafter", decoding.drafter] if kind == DRAFT_MODEL and decoding.drafter else []
    return ("--method", method, *heads, *drafter)


@cache
def _file_digest(path: Path, changed: int) -> str:
    """Return the checksum of a file, cached per modification time ``changed`` because a corpus may be large."""
    return file_checksum(path)


@dataclass(frozen=True)
class SetupStores:
    """Stores of a set-up by kind. A store belongs to the set-up if it holds every text the set-up builds it from."""

    folders: Mapping[str, Path]
    inputs: Mapping[str, Callable[[], Sequence[Path]]]
    """Functions that return the text files of each store; the parts of logs are known only after the logs were read."""
    model: str
    replace: bool
    """True if stores that another command built may be replaced."""

    def built(self, kind: str) -> Manifest | None:
        """Return the store's manifest if it belongs to this set-up, even if more texts were added, else None."""
        folder, inputs = self.folders[kind], self.inputs[kind]()
        if not inputs or not holds_manifest(folder) or not all(path.exists() for path in inputs):
            return None
        manifest = read_manifest(folder, check=not self.replace)
        held = {share.sha256 for share in manifest.sources}
        return manifest if all(_file_digest(path, path.stat().st_mtime_ns) in held for path in inputs) else None

    def check(self) -> None:
        """Raise if a folder is no valid destination of a build, or if it holds a store that must not be replaced."""
        for kind, folder in self.folders.items():
            check_destination(folder)
            if check := self.replacement_check(kind):
                check(folder)

    def fate(self, kind: str) -> str:
        """Return what will happen to a folder that ``check`` accepted, worded as the start of a sentence."""
        folder = self.folders[kind]
        if not holds_manifest(folder):
            return "goes to"
        if self.built(kind):
            return "was built before and stays in"
        rankings = kind == MODEL_KIND and read_manifest(folder, check=False).holds_rankings_alone
        return "joins the rankings in" if rankings else "replaces the store in"

    def replacement_check(self, kind: str) -> FolderCheck | None:
        """Return a check that raises if this set-up did not build the store; None if any store may be replaced."""
        return None if self.replace else partial(self._refuse_other, kind)

    def _refuse_other(self, kind: str, folder: Path) -> None:
        if holds_manifest(folder) and not self.built(kind) and not read_manifest(folder).holds_rankings_alone:
            raise StoreError(
                f"{folder} holds a {kind} store of {self.model}: --replace replaces it, and hdtool add {folder} FILES "
                "extends it without a set-up"
            )

    def require(self) -> None:
        """Raise a ``StoreError`` if another command has replaced a store since it was built."""
        for kind, folder in self.folders.items():
            if not self.built(kind):
                raise StoreError(f"{folder} was replaced by another command meanwhile: run setup again")


PROMPT_LENGTHS = (16, 128, 1024)
"""Prompt lengths, in tokens, whose prefill is timed."""
PREFILLS = 2
"""Number of prefills per length; the fastest one counts."""
ANSWER_TOKENS = 24
"""Number of tokens of the plain answer that measures the host time per step."""

Floats = npt.NDArray[Any]


@dataclass(frozen=True)
class Overhead:
    """Prefill time and host time per step, which a cost curve does not include."""

    lengths: tuple[int, ...]
    """Measured prompt lengths, in tokens."""
    prefill_seconds: tuple[float, ...]
    host_seconds: float
    """Seconds per step outside the forward pass."""

    @classmethod
    def measured(cls, loaded: Loaded) -> Overhead:
        target, vocabulary = loaded.target, loaded.target.config.vocab_size
        limit = target.context_limit(max(PROMPT_LENGTHS))
        lengths = tuple(length for length in PROMPT_LENGTHS if limit is None or length < limit)
        fastest = []
        for length in lengths:
            prefill = partial(target.prefill, target.allocate(), 0, some_context(length, vocabulary))
            fastest.append(min(timed(target.device, prefill)[1] for _ in range(PREFILLS)))
        answer = answer_steps(loaded, NoDraft(), SamplingConfig(), ANSWER_TOKENS, some_context(lengths[0], vocabulary))
        steps = list(answer)[1:]  # the first one is the prefill
        host = float(np.median([step.seconds - step.verify_seconds for step in steps])) if steps else 0.0
        return cls(lengths, tuple(fastest), host)

    def predict(self, result: ReplayResult, curve: CostCurve) -> SpeedPrediction:
        """Predict tokens per second of a replayed method and of plain decoding, as means over answers like `bench`."""
        prompts = np.array([turn.prompt_tokens for turn in result.turns])
        # The first step of a turn is its prefill.
        prefills = self._prefills(prompts) - curve.seconds_of_passes(np.zeros(len(prompts)), prompts)
        drafted, plain = [], []
        for turn, prefill in zip(result.turns, prefills, strict=True):
            tokens, steps = len(turn.tokens), len(turn.nodes)
            places = turn.prompt_tokens + np.arange(tokens)
            one_by_one = curve.seconds_of_passes(np.zeros(tokens), places).sum() + prefill + tokens * self.host_seconds
            trees = curve.seconds_of_passes(turn.nodes, turn.contexts).sum() + prefill + steps * self.host_seconds
            plain.append(tokens / one_by_one)
            drafted.append(tokens / (trees + turn.draft_seconds.sum() + turn.observe_seconds.sum()))
        return SpeedPrediction(fmean(drafted), fmean(plain))

    def _prefills(self, prompts: Floats) -> Floats:
        """Return prefill seconds by prompt length: interpolated, and extrapolated linearly beyond the longest one."""
        seconds: Floats = np.interp(prompts, self.lengths, self.prefill_seconds)
        if len(self.lengths) > 1:
            rise = self.prefill_seconds[-1] - self.prefill_seconds[-2]
            slope = max(0.0, rise) / (self.lengths[-1] - self.lengths[-2])
            seconds = seconds + slope * np.maximum(0, prompts - self.lengths[-1])
        return seconds


def replay_by_source(
    conversations: Sequence[Sequence[RecordedTurn]],
    store_set: StoreSet,
    curve: CostCurve,
    overhead: Overhead,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Measure tokens per step as sources are added one by one, and predict tokens per second.

    The predictions use all sources but the history, which starts empty.
    """
    stores = {"M": store_set.model, "S": store_set.corpus}
    letters = "C" + "".join(letter for letter, store in stores.items() if store)
    contenders = [_cold_method(letters[: index + 1], curve) for index in range(len(letters))]
    cold = contenders[-1].name
    contenders.append(ReplayMethod(SOURCE_NAMES[HISTORY_LETTER], DecodeConfig(sources=HISTORY_LETTER + letters), curve))
    with progress_bar(total_turns(contenders, conversations, ()), "turns", quiet=quiet) as progress:
        replayed = replay(contenders, conversations, store_set, on_progress=progress.to)
    predicted = overhead.predict(replayed[cold], curve)
    return {
        "tokens_per_step": {name: round(result.tokens_per_step, 3) for name, result in replayed.items()},
        "accepted": {str(source): share.accepted for source, share in replayed[cold].by_source().items()},
        "draft_tokens_per_step": round(replayed[cold].nodes_per_step, 1),
        "tokens_per_second": predicted.tokens_per_second,
        "plain_tokens_per_second": predicted.plain_tokens_per_second,
    }


def replay_with_model_store(
    conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet, curve: CostCurve, *, quiet: bool
) -> float:
    """Return the tokens per step with only the conversation and the model store as sources."""
    contender = _cold_method("CM", curve)
    with progress_bar(total_turns([contender], conversations, ()), "turns", quiet=quiet) as progress:
        replayed = replay([contender], conversations, store_set, on_progress=progress.to)
    return round(replayed[contender.name].tokens_per_step, 3)


def _cold_method(letters: str, curve: CostCurve) -> ReplayMethod:
    """Return a method without history that drafts from the given sources, named after the last one."""
    return ReplayMethod(SOURCE_NAMES[letters[-1]], DecodeConfig(sources=letters, history=NO_HISTORY), curve)
