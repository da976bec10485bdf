"""Stages of a set-up: each leaves a result that later stages and the verdict read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hdtool.builders.evaluation.measured_passes import measured_passes
from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader
from hdtool.builders.setup.advice import MIN_STORE_ANSWERS
from hdtool.builders.setup.held_out_answers import answer_prompts, number_of_prompts
from hdtool.builders.setup.held_out_choice import choose_held_out, opening_hash
from hdtool.builders.setup.replays import Overhead, replay_by_source, replay_with_model_store
from hdtool.builders.setup.setup_stores import SetupStores
from hdtool.builders.setup.verdict import doubted
from hdtool.builders.setup.work_folder import LearnedPart, WorkFolder, learned_name, remove_half
from hdtool.builders.stores.build_stores import build_corpus_index, build_model_store, vocabulary_rankings
from hdtool.builders.stores.edit_store import add, note_on_models
from hdtool.builders.stores.frequent_sequences import tokenized
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.data.conversation_files import ConversationReader, LocatedConversation, canonical_file, canonical_line
from hdtool.data.documents import InputFile
from hdtool.data.errors import ModelError, RecordError
from hdtool.data.notes import tell
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import read_prompts
from hdtool.data.record_counts import Tally
from hdtool.data.stores.kinds import CORPUS_KIND as CORPUS, MODEL_KIND as MODEL
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST, holds_manifest
from hdtool.data.stores.store_folder import read_manifest, recorded_name
from hdtool.data.stores.stores_at_home import NO_STORE, corpus_index_at_home, model_store_at_home
from hdtool.data.texts_and_traces import Record, RecordReader, read_traces
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.drafters.drafter_factory import compile_ahead, finish_compiling
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.kernels.machine_name import device_name, dtype_name, machine
from hdtool.runtime.settings.building import SetupConfig
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.measuring import CostConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.model_store import rankings_in
from hdtool.runtime.stores.store_opener import StoreOpener
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.weights.checkpoint_identity import CONFIG_FILES, checkpoint_of, place_of

Result = dict[str, Any]
STORE_STAGES = {MODEL: "model_store", CORPUS: "corpus_index"}
MEASUREMENTS = ("passes", "replay", "answers")
"""Stages whose results depend on loading options, stores, machine and versions."""


@dataclass(frozen=True)
class SetupPlan:
    """Inputs and settings of a set-up."""

    logs: Sequence[Path]
    corpus: Sequence[Path]
    model: ModelConfig
    config: SetupConfig
    sampling: SamplingConfig
    chat: bool | None = None
    replace: bool = False
    """True if stores that another command built may be replaced."""

    @property
    def identity(self) -> list[str]:
        """Inputs and settings that determine which conversations are held out; changing one starts a new set-up."""
        return [repr(part) for part in (_file_states(self.logs), self.config.held_out, self.config.max_bad_fraction)]

    def conditions(self) -> dict[str, list[str]]:
        """Return what each measurement depends on, besides the weights, the machine and the versions."""
        all_depend_on = [
            repr(part) for part in (self.model, self.chat, _file_states(self.corpus), self.config.rankings)
        ]
        answers = [repr(part) for part in (self.config.limit, self.config.max_new_tokens, self.sampling)]
        return {stage: [*all_depend_on, *(answers if stage == "answers" else ())] for stage in MEASUREMENTS}


def _file_states(paths: Sequence[Path]) -> list[tuple[str, int, int]]:
    """Return path, size and modification time of each file, to detect changes."""
    return [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


class EverySecondRecord(RecordReader):
    """Reads every second record of the inputs."""

    def __iter__(self) -> Iterator[Record]:
        return islice(super().__iter__(), 0, None, 2)


def _has_rankings(stores: SetupStores) -> bool:
    folder = stores.folders.get(MODEL)
    return folder is not None and holds_manifest(folder) and "rankings" in read_manifest(folder).files


def _described(folder: Path, manifest: Manifest) -> Result:
    return {"folder": str(folder), "tokens": manifest.counts["tokens"]}


class Stages:
    """Runs the stages of a set-up in order. Model, tokenizer and stores are loaded at first use."""

    def __init__(self, plan: SetupPlan, folder: WorkFolder) -> None:
        self._plan, self._folder = plan, folder
        self._stages: dict[str, tuple[str, Callable[[], Result]]] = {
            "read": ("reading the logs", self._read),
            "model_store": ("building the model store", self._build_model_store),
            **({"corpus_index": ("building the corpus index", self._build_corpus_index)} if plan.corpus else {}),
            "passes": ("measuring forward passes", self._measure_passes),
            "replay": ("replaying the held-out conversations", self._replay),
            "answers": ("answering held-out prompts with and without drafts", self._answer),
        }

    def titles(self) -> dict[str, str]:
        """Return a description of each stage by name."""
        return {name: title for name, (title, _) in self._stages.items()}

    def check(self) -> None:
        """Raise a StoreError in advance if a destination is invalid or holds a store that must not be replaced."""
        self._planned.check()

    def run(self, on_stage: Callable[[str], None]) -> None:
        """Run all unfinished stages, calling ``on_stage`` with the name of every stage before it runs or is skipped."""
        self._stores.check()
        self._folder.keep_measurements(self._conditions(self._checkpoint))
        self._folder.forget(*self._outdated(self._stores))
        for name, (_, run) in self._stages.items():
            on_stage(name)
            if name not in self._folder.stages:
                self._folder.finish(name, run())
            if name == "read" and "replay" not in self._folder.stages:  # the logs can be read, so it is worth it
                compile_ahead(self._plan.model, "hd")

    def remaining(self) -> list[str]:
        """Return the names of the stages to run; without local weights, they include all that depend on weights."""
        outdated = {*self._outdated(self._planned), *self._folder.outdated(self._conditions(self._planned_checkpoint))}
        return [name for name in self._stages if name in outdated or name not in self._folder.stages]

    def _conditions(self, model: Checkpoint | None) -> dict[str, list[str]]:
        """Return everything that each measurement depends on, by stage."""
        weights = model.fingerprint if model else ""
        versions = [weights, self._fingerprint.fingerprint, machine(), version("hdtool")]
        index = corpus_index_at_home(self._fingerprint)
        if not self._plan.corpus and holds_manifest(index):  # held-out prompts are answered with drafts from the index
            versions.append(repr(_file_states([index / MANIFEST])))
        return {stage: [*versions, *conditions] for stage, conditions in self._plan.conditions().items()}

    def _outdated(self, stores: SetupStores) -> list[str]:
        """Return the stages whose files are missing or were replaced by another command, and measurements in doubt."""
        copies = [*self._folder.learned_files, self._folder.held_out]
        stages = [] if all(path.exists() for path in copies) else ["read"]
        stages += [
            stage for kind, stage in STORE_STAGES.items() if kind not in stores.folders or not stores.own_manifest(kind)
        ]
        if self._plan.config.rankings and not _has_rankings(stores):
            stages.append(STORE_STAGES[MODEL])
        if doubted(self._folder.stages):
            stages += MEASUREMENTS
        return stages

    @cached_property
    def _stores(self) -> SetupStores:
        return self._stores_of(self._checkpoint)

    @cached_property
    def _planned(self) -> SetupStores:
        """Stores whose folders are known before any download; without local weights, these exclude the model store."""
        return self._stores_of(self._planned_checkpoint)

    @cached_property
    def _planned_checkpoint(self) -> Checkpoint | None:
        return checkpoint_of(self._plan.model)

    def _stores_of(self, model: Checkpoint | None) -> SetupStores:
        folders = {MODEL: model_store_at_home(model, self._fingerprint)} if model else {}
        if self._plan.corpus:
            folders[CORPUS] = corpus_index_at_home(self._fingerprint)
        inputs = {MODEL: lambda: self._folder.learned_files, CORPUS: lambda: self._plan.corpus}
        return SetupStores(folders, inputs, self._plan.model.name, self._plan.replace)

    def planned_stores(self) -> dict[str, tuple[str, Path | None]]:
        """Map each kind of store to ``(effect, folder)``: what the build does to the folder, and the folder.

        The folder is None if it depends on weights that are not local.
        """
        stores = self._planned
        return {
            kind: (stores.build_effect(kind), stores.folders[kind]) if kind in stores.folders else ("goes to", None)
            for kind in ((MODEL, CORPUS) if self._plan.corpus else (MODEL,))
        }

    @cached_property
    def _checkpoint(self) -> Checkpoint:
        place_of(self._plan.model, CONFIG_FILES, weights=True)  # downloads what the hub's cache lacks
        checkpoint = checkpoint_of(self._plan.model)
        if checkpoint is None:
            raise ModelError(
                f"{self._plan.model.name} has no weights that can be read: get the checkpoint again, whole"
            )
        return checkpoint

    @cached_property
    def _reader(self) -> ConversationReader:
        return ConversationReader(self._plan.logs, tolerance=self._plan.config.max_bad_fraction)

    @cached_property
    def _turns(self) -> TurnReader:
        return TurnReader.of_model(self._plan.model, self._plan.chat)

    @property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self._turns.tokenizer

    @cached_property
    def _fingerprint(self) -> TokenizerFingerprint:
        return TokenizerFingerprint.of(self._tokenizer)

    @cached_property
    def _loaded(self) -> Loaded:
        loaded = load(self._plan.model)
        finish_compiling()  # passes are timed from here on
        choose_threads(loaded.target, self._plan.model.threads)
        return loaded

    @cached_property
    def _store_set(self) -> StoreSet:
        self._stores.require()
        folders_by_option = {f"{kind}_db": str(folder) for kind, folder in self._stores.folders.items()}
        return self._open(StoresConfig(**folders_by_option))

    def _open(self, stores: StoresConfig) -> StoreSet:
        return StoreOpener(self._plan.model.name, self._tokenizer, self._checkpoint, stores).open()

    @cached_property
    def _held_out(self) -> list[list[RecordedTurn]]:
        tally = Tally()  # a template may refuse roles that other templates accept
        held_out = [turns for _, turns in self._turns.usable(read_traces([self._folder.held_out]), tally)]
        tell(*tally.left_out())
        if not held_out:
            raise RecordError("no held-out conversation can be rebuilt with this model's chat template: try --raw")
        return held_out

    def openings(self) -> list[bytes]:
        """Return, for every logged conversation that holds an answer, the hash of its first question."""
        logged = self._logged("reading")
        openings = [opening_hash(located.conversation) for located in logged if located.conversation.answers]
        tally = self._reader.tally
        lines = [*tally.left_out(), note_on_models(tally.models, self._plan.model, self._planned_checkpoint)]
        tell(*filter(None, lines))
        return openings

    def _logged(self, title: str) -> Iterator[LocatedConversation]:
        with progress_bar(self._reader.total_bytes, title, unit="B") as progress:
            for located in self._reader.conversations():
                yield located
                progress.to(self._reader.bytes_read)

    def _read(self) -> Result:
        openings = self.openings()
        chosen = choose_held_out(openings, self._plan.config.held_out)
        counts: Counter[int] = Counter()
        measured = canonical_file(self._folder.held_out, private=True)
        with measured.replaced() as held, self._folder.writing_learned() as learn:
            for located in self._logged("splitting"):
                if not located.conversation.answers:
                    continue
                line = canonical_line(located)
                if opening_hash(located.conversation) in chosen:
                    held.write(line)
                else:
                    learn(located.source, line)
                    counts[located.source] += 1
        learned = [
            LearnedPart(recorded_name(str(self._plan.logs[log])), learned_name(log), number)
            for log, number in sorted(counts.items())
        ]
        return {"conversations": len(openings), "held_out": sum(map(chosen.__contains__, openings)), "learned": learned}

    def _build_model_store(self) -> Result:
        reading = self._learned()
        folder = self._stores.folders[MODEL]
        known = self._known_rankings()
        if known is None and self._plan.config.rankings:
            known = vocabulary_rankings(self._loaded, self._fingerprint.vocab_size)
        # Name the source after the log, so that users can find and drop it.
        sources = [
            replace(source, name=part.log) for source, part in zip(reading.sources, self._folder.learned, strict=True)
        ]
        build = partial(build_model_store, model=self._checkpoint, rankings=known)
        described = self._built(MODEL, reading, sources, build)
        if known is not None and not _has_rankings(self._stores):  # the store was built before
            add(folder, (), (), self._fingerprint, MODEL, known)
        return described

    def _learned(self) -> RecordReader:
        return RecordReader(self._folder.learned_files, answers_only=True)

    def _known_rankings(self) -> Ints | None:
        folder = self._stores.folders[MODEL]
        return rankings_in(folder, read_manifest(folder)) if holds_manifest(folder) else None

    def _build_corpus_index(self) -> Result:
        reading = RecordReader(self._plan.corpus, tolerance=self._plan.config.max_bad_fraction)
        return self._built(CORPUS, reading, reading.sources, build_corpus_index)

    def _built(
        self, kind: str, reading: RecordReader, sources: Sequence[InputFile], build: Callable[..., Manifest]
    ) -> Result:
        folder = self._stores.folders[kind]
        if manifest := self._stores.own_manifest(kind):  # a set-up was killed before it recorded the build
            return _described(folder, manifest)
        manifest = build(
            folder,
            tokenized(reading, self._tokenizer),
            self._fingerprint,
            sources,
            executor=BuildExecutor(),
            check=self._stores.replacement_check(kind),
        )
        tell(*reading.tally.left_out())
        return _described(folder, manifest)

    def _measure_passes(self) -> Result:
        longest = max(len(turn.prompt) + len(turn.answer) for turns in self._held_out for turn in turns)
        curve, doubt = measured_passes(self._loaded, CostConfig(longest=max(CostConfig.shortest, longest)))
        curve.write(self._folder.cost)
        target = self._loaded.target
        return {
            "doubt": doubt,
            "device": device_name(target.device),
            "dtype": dtype_name(target.dtype),
            "threads": torch.get_num_threads(),
            **asdict(Overhead.measured(self._loaded)),
        }

    def _replay(self) -> Result:
        passes = self._folder.stages["passes"]
        overhead = Overhead(tuple(passes["lengths"]), tuple(passes["prefill_seconds"]), passes["host_seconds"])
        curve = CostCurve.read(self._folder.cost)
        result = replay_by_source(self._held_out, self._store_set, curve, overhead)
        return {**result, "learning_curve": self._learning_curve(curve, result["tokens_per_step"]["model"])}

    def _learning_curve(self, curve: CostCurve, whole: float) -> list[Result]:
        """Return the tokens per step with half of the answers in the model store and with all of them.

        The list is empty if there are too few answers.
        """
        answers = read_manifest(self._stores.folders[MODEL]).counts["documents"]
        if answers < MIN_STORE_ANSWERS:
            return []
        reading, half_folder = EverySecondRecord(self._folder.learned_files, answers_only=True), self._folder.half
        try:
            manifest = build_model_store(
                half_folder,
                tokenized(reading, self._tokenizer),
                self._fingerprint,
                reading.sources,
                executor=BuildExecutor(),
                model=self._checkpoint,
                rankings=self._known_rankings(),
            )
            store_set = self._open(StoresConfig(model_db=str(half_folder), corpus_db=NO_STORE))
            half = replay_with_model_store(self._held_out, store_set, curve)
        finally:
            remove_half(self._folder.half)
        return [
            {"answers": manifest.counts["documents"], "tokens_per_step": half},
            {"answers": answers, "tokens_per_step": whole},
        ]

    def _answer(self) -> Result:
        config = self._plan.config
        plain = self._folder.stages["replay"]["plain_tokens_per_second"]
        number = config.limit or number_of_prompts(config.max_new_tokens, plain)
        prompts = read_prompts(self._folder.held_out)
        return answer_prompts(
            self._loaded,
            self._store_set,
            self._plan.model,
            self._plan.sampling,
            prompts,
            number,
            config.max_new_tokens,
            self._plan.chat,
            place_of(self._plan.model, CONFIG_FILES),
        )
