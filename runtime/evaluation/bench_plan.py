"""The plan of a benchmark and its execution: from settings and questions to a folder of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hdtool.data.bench_results import ResultFolder, Results, Run, locked, read_results, refuse_other_options
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.prompts import Prompt
from hdtool.data.spec_bench import question_id
from hdtool.runtime.config import (
    LLAMA_CPP,
    METHODS,
    OTHER_FILE,
    WITHOUT_GRAMMARS,
    BenchConfig,
    DecodeConfig,
    ModelConfig,
    SamplingConfig,
    StoresConfig,
)
from hdtool.runtime.drafters.trained.select_drafter import methods_with_drafters
from hdtool.runtime.environment import compute_with, describe_environment
from hdtool.runtime.evaluation.bench import Bench, hash_of, turns_of
from hdtool.runtime.evaluation.lineup import Lineup
from hdtool.runtime.evaluation.llama_cpp_peer import (
    KEY,
    check_file,
    check_same_model,
    describe_build,
    files_of,
    why_not,
)
from hdtool.runtime.evaluation.scores import baseline_of
from hdtool.runtime.evaluation.warm_up import questions_to_warm_up
from hdtool.runtime.model.load import load
from hdtool.runtime.stores.store_set import StoreSet

FREE = ("method", "out", "baseline", "limit", "per_task", "trust_remote_code")
"""Settings that change no answer and no time; the hash of the questions depends on the choice among them."""


@dataclass(frozen=True)
class Plan:
    """All settings of a measurement."""

    questions: Sequence[Prompt]
    bench: BenchConfig = field(default_factory=BenchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    decoding: DecodeConfig = field(default_factory=DecodeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    store_set: StoresConfig = field(default_factory=StoresConfig)
    chat: bool | None = None
    spare: Sequence[Prompt] = ()
    """Questions that are not measured, for the warm-up."""

    def options(self) -> dict[str, Any]:
        """The settings as ``run.json`` records them; a run with equal settings is resumed."""
        # The threads of the benchmark replace those of the model.
        parts = (self.model, self.decoding, self.sampling, self.store_set, self.bench)
        named = {name: value for part in parts for name, value in asdict(part).items() if name not in FREE}
        # As JSON has them: a run that was read has lists.
        listed = {name: list(value) for name, value in named.items() if isinstance(value, tuple)}
        return named | listed | {"chat": self.chat, "questions": hash_of(self.questions)}

    def at(self, temperature: float) -> Plan:
        """The same plan at another temperature, with its results in a subfolder."""
        place = Path(self.bench.out) / f"temperature-{temperature:g}"
        sampling = replace(self.sampling, temperature=temperature)
        bench = replace(self.bench, out=str(place))
        if not sampling.is_greedy:
            methods = self.bench.methods and tuple(name for name in self.bench.methods if name not in LLAMA_CPP)
            bench = replace(bench, methods=methods, llama_cpp_file=None)
        return replace(self, bench=bench, sampling=sampling)

    def results(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> Results:
        """Measure what the folder lacks; ``on_progress`` receives the number of answers so far, and of all.

        Each turn of a question counts once for each contender and round, those of the warm-up too.
        """
        folder = Path(self.bench.out)
        before = Run.read(folder)
        if before is not None:
            options = self.options()
            # A complete run of an earlier version is shown as it is; one that lacks settings is not resumed.
            refuse_other_options(folder, before, {name: options[name] for name in options if name in before.options})
            found = read_results(folder)
            if found.complete:
                return found
            refuse_other_options(folder, before, options)
        with locked(folder):
            self._measure(folder, on_progress)
        return read_results(folder)

    def _measure(self, folder: Path, on_progress: Callable[[int, int], None]) -> None:
        files = files_of(self.model, self.bench.llama_cpp_file)
        obstacles = {name: why_not(name, files, self.model, self.sampling) for name in LLAMA_CPP}
        for name in self.bench.methods or ():
            if reason := obstacles.get(name):
                raise ModelError(f"{name} {reason}")
        other = files.get(OTHER_FILE)
        if other:
            check_file(other)
        grammars = any(question.grammar for question in self.questions)
        if grammars and (named := [name for name in self.bench.methods or () if name in WITHOUT_GRAMMARS]):
            raise OptionError(f"{named[0]} cannot be measured on answers that follow a grammar: leave it out")
        compute_with(self.bench.threads)
        loaded = load(self.model)
        letters = {one for name in self.bench.methods or METHODS if name in METHODS for one in METHODS[name].databases}
        store_set = StoreSet.for_tokenizer(
            loaded.tokenizer, self.store_set, "".join(letters), model=loaded.checkpoint, identified=True
        )
        if other:
            check_same_model(other, loaded)
        runnable = [name for name, reason in obstacles.items() if not reason]
        trained = methods_with_drafters(self.decoding, loaded.target.model)
        has_corpus = store_set.corpus is not None
        methods = self.bench.chosen(has_corpus=has_corpus, trained=trained, llama_cpp=runnable, grammars=grammars)
        baseline_of(methods, self.bench.baseline)
        rows = {name: files[name] for name in methods if name in LLAMA_CPP}
        build = describe_build(rows, on_gpu=loaded.target.device.type == "cuda") if rows else None
        llama_cpp = {"llama_cpp": build["version"], KEY: build} if build else {}
        run = Run(
            self.options(),
            methods,
            len(self.questions),
            describe_environment(loaded, store_set) | llama_cpp,
            datetime.now(UTC).isoformat(timespec="seconds"),
        )
        ids = [question_id(question.id) for question in self.questions]
        results = ResultFolder(folder, run, ids)
        lineup = Lineup(loaded, store_set, self.model, self.decoding, self.sampling)
        contenders = lineup.contenders(methods, self.bench.assistant, rows)
        most = self.decoding.max_new_tokens
        progress = _Progress(on_progress)
        bench = Bench(loaded, contenders, most, self.chat, self.bench.rounds, self.bench.drafters, progress.advance)
        bench.check(self.questions)
        warm_up = questions_to_warm_up(self.questions, self.spare, self.bench.warm_up, bench.fits)
        left = self.questions[results.answered :]
        progress.begin(len(contenders) * (sum(map(turns_of, warm_up)) + self.bench.rounds * sum(map(turns_of, left))))
        bench.warm_up(warm_up)
        for answers in bench.answers(self.questions, results.answered):
            results.add(answers)


class _Progress:
    """Counts the answers of a benchmark."""

    def __init__(self, on_progress: Callable[[int, int], None]) -> None:
        self._on_progress = on_progress
        self._done = self._total = 0

    def begin(self, total: int) -> None:
        self._total = total
        self._on_progress(0, total)

    def advance(self) -> None:
        self._done += 1
        self._on_progress(self._done, self._total)
