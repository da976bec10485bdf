"""Plans a benchmark from settings and questions, runs it, and writes a result folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hdtool.builders.evaluation.bench import Bench, questions_hash, turn_count
from hdtool.builders.evaluation.contenders import Contender, DraftingContender, FreshDrafters, GenerateContender
from hdtool.builders.evaluation.environment import describe_environment
from hdtool.builders.evaluation.llama_cpp_peer import (
    BUILD_KEY,
    LlamaCppContender,
    check_file,
    check_same_model,
    describe_build,
    exclusion_reason,
    row_files,
)
from hdtool.builders.evaluation.scores import baseline_of
from hdtool.builders.evaluation.shared_threads import choose_shared_threads
from hdtool.data.answered_questions import question_id
from hdtool.data.bench_results import (
    BenchRun,
    ResultFolder,
    Results,
    locked_results,
    read_results,
    refuse_other_options,
)
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.progress import progress_bar
from hdtool.data.prompts import Prompt, interleave_categories
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.drafters.drafter_factory import compile_ahead, finish_compiling
from hdtool.runtime.drafters.trained_drafter_factory import methods_with_drafters
from hdtool.runtime.kernels.linear_layers import has_compiled_layers, share_weights
from hdtool.runtime.kernels.machine_name import dtype_name
from hdtool.runtime.settings.decoding import METHODS, DecodeConfig, StoresConfig, methods_with
from hdtool.runtime.settings.draft_sources import SOURCE_LETTERS
from hdtool.runtime.settings.measuring import LLAMA_CPP, OTHER_FILE, PEERS, WITHOUT_GRAMMARS, BenchConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import recorded_settings
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load, load_stock, load_tokenizer

WARM_UP_PROMPTS = (
    "Explain in a few sentences why leaves turn red in autumn, and what happens to the tree in winter.",
    "Write a Python function that returns the words of a text with their counts, most frequent first.",
    "A train covers 60 km in 45 minutes. How far does it travel in 2 hours at the same speed? Show each step.",
    "Write a short letter to a neighbour who has looked after the garden during the holidays.",
)
"""Warm-up prompts used if there are too few unmeasured questions."""


def warm_up_questions(
    measured: Sequence[Prompt], spare: Sequence[Prompt], count: int, fits: Callable[[Prompt], bool]
) -> list[Prompt]:
    """Return ``count`` questions for the warm-up, which is not measured; fewer if no embedded prompt fits the model.

    ``spare`` questions that fit come first, of different categories, then ``WARM_UP_PROMPTS``, again and again.
    Questions with the text of a measured question are excluded, whatever their id.
    """
    measured_texts = {question.messages[-1]["content"] for question in measured}
    unmeasured = [question for question in spare if question.messages[-1]["content"] not in measured_texts]
    own_prompts = [
        Prompt.from_text(text, id=f"warm-up {number}")
        for number, text in enumerate(WARM_UP_PROMPTS, start=1)
        if text not in measured_texts
    ]
    usable = filter(fits, interleave_categories(unmeasured, len(unmeasured)))
    return list(islice(chain(usable, cycle(filter(fits, own_prompts))), count))


GENERATE_PEERS = set(PEERS) - set(LLAMA_CPP)
PROMPT_LOOKUP_TOKENS = 10
"""Number of tokens that ``generate`` drafts by prompt lookup, as in transformers' documentation."""


class ContenderFactory:
    """Creates the contenders of a benchmark.

    hdtool's methods share the loaded target. ``generate`` runs on the target's model or, if hdtool replaced the linear
    layers, as it does for small models on CPUs, on a stock model that shares the weights. llama.cpp reads its weights
    from a GGUF file.
    """

    def __init__(
        self, loaded: Loaded, store_set: StoreSet, model: ModelConfig, decoding: DecodeConfig, sampling: SamplingConfig
    ) -> None:
        self._loaded = loaded
        self._new_drafter = FreshDrafters(loaded.target, store_set)
        self._config = replace(model, device=str(loaded.target.device), dtype=dtype_name(loaded.target.dtype))
        self._decoding = decoding
        self._sampling = sampling

    def contenders(
        self, names: Sequence[str], assistant: str | None = None, llama_cpp: Mapping[str, Path] | None = None
    ) -> dict[str, Contender]:
        """Return contenders by name, in the given order.

        ``assistant`` names the draft model of ``generate-assisted``. ``llama_cpp`` maps llama.cpp contenders to GGUF
        files.
        """
        contenders: dict[str, Contender] = {}
        for name in names:
            if name in GENERATE_PEERS:
                contenders[name] = self._peer(name, self._stock, assistant)
            elif name in LLAMA_CPP:
                file, lookup = (llama_cpp or {})[name], name == "llama.cpp-pld"
                contenders[name] = LlamaCppContender(self._loaded, file, self._decoding.max_new_tokens, lookup=lookup)
            else:
                new = partial(self._new_drafter, replace(self._decoding, method=name))
                max_new_tokens = self._decoding.max_new_tokens
                contenders[name] = DraftingContender(
                    self._loaded, new(), self._sampling, max_new_tokens, new, self._decoding.draft_tokens
                )
        return contenders

    def choose_threads(self, names: Sequence[str], wanted: int | None) -> None:
        """Set the number of threads of all contenders: ``wanted`` or, if None, a number that suits them."""
        peer = self._stock if set(names) & GENERATE_PEERS else None
        choose_shared_threads(self._loaded.target, peer, wanted)

    def _peer(self, name: str, stock: PreTrainedModel, assistant: str | None) -> Contender:
        drafting: dict[str, Any] = {}
        if name == "generate-pld":
            drafting = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        elif name == "generate-assisted":
            drafting = self._assistant_options(
                stock, replace(self._config, model=assistant, gguf_file=None, quantization=None)
            )
        return GenerateContender(self._loaded, stock, self._sampling, self._decoding.max_new_tokens, **drafting)

    @cached_property
    def _stock(self) -> PreTrainedModel:
        """Model on which ``generate`` runs: the target's or, if hdtool replaced layers in it, a stock one."""
        model: PreTrainedModel = self._loaded.target.model
        if not has_compiled_layers(model):
            return model
        stock = load_stock(self._config)
        share_weights(stock, model)
        return stock

    def _assistant_options(self, stock: PreTrainedModel, config: ModelConfig) -> dict[str, Any]:
        tokenizer = load_tokenizer(config)
        target_fingerprint, assistant_fingerprint = (
            TokenizerFingerprint.of(self._loaded.tokenizer),
            TokenizerFingerprint.of(tokenizer),
        )
        if target_fingerprint != assistant_fingerprint:
            raise ModelError(
                f"{config.model} cannot assist {self._loaded.name}: its tokenizer is another one "
                f"({assistant_fingerprint.vocab_size:,} tokens, the model's has {target_fingerprint.vocab_size:,}): "
                "name a draft model of the same family"
            )
        assistant = load_stock(config)
        options = {"assistant_model": assistant}
        if assistant.config.get_text_config().vocab_size == stock.config.get_text_config().vocab_size:
            return options
        # Embeddings padded to different sizes make transformers assume different tokenizers.
        return options | {"tokenizer": self._loaded.tokenizer, "assistant_tokenizer": tokenizer}


@dataclass(frozen=True)
class BenchPlan:
    """Questions and settings of a benchmark."""

    questions: Sequence[Prompt]
    bench: BenchConfig = field(default_factory=BenchConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    decoding: DecodeConfig = field(default_factory=DecodeConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stores: StoresConfig = field(default_factory=StoresConfig)
    chat: bool | None = None
    spare: Sequence[Prompt] = ()
    """Questions for the warm-up, which are not measured."""

    def options(self) -> dict[str, Any]:
        """Return the settings as recorded in ``run.json``; only a run with equal settings is resumed."""
        # ``self.bench`` comes last because its ``threads`` overrides the model's.
        settings = recorded_settings(self.model, self.decoding, self.sampling, self.stores, self.bench)
        return settings | {"chat": self.chat, "questions": questions_hash(self.questions)}

    def at(self, temperature: float) -> BenchPlan:
        """Return this plan at another temperature, with its results in a subfolder.

        For sampling temperatures, llama.cpp is left out, because it is measured with greedy decoding only.
        """
        folder = Path(self.bench.out) / f"temperature-{temperature:g}"
        sampling = replace(self.sampling, temperature=temperature)
        bench = replace(self.bench, out=str(folder))
        if not sampling.is_greedy:
            methods = self.bench.methods and tuple(name for name in self.bench.methods if name not in LLAMA_CPP)
            bench = replace(bench, methods=methods, llama_cpp_file=None)
        return replace(self, bench=bench, sampling=sampling)

    def results(self, threads: int | None = None) -> Results:
        """Measure the questions that have no result in the folder yet; return all results.

        The number of threads is that of the plan, else that of the interrupted run, else ``threads``. If all are None,
        a number that suits all contenders is chosen.
        """
        folder = Path(self.bench.out)
        before = BenchRun.read(folder)
        if before is not None:
            options = self.options()
            # If an earlier hdtool version recorded fewer settings, a complete run is returned, but an incomplete run is
            # not resumed.
            refuse_other_options(folder, before, {name: options[name] for name in options if name in before.options})
            results = read_results(folder)
            if results.complete:
                return results
            refuse_other_options(folder, before, options)
            threads = before.surroundings.get("threads")
        with locked_results(folder):
            self._measure(folder, threads if self.bench.threads is None else self.bench.threads)
        return read_results(folder)

    def _measure(self, folder: Path, threads: int | None) -> None:
        files = row_files(self.model, self.bench.llama_cpp_file)
        runnable = self._check_methods(files)
        if threads is not None:
            torch.set_num_threads(threads)
        loaded, store_set = self._load(files.get(OTHER_FILE))
        methods = self._methods(loaded, store_set, runnable)
        rows = {name: files[name] for name in methods if name in LLAMA_CPP}
        lineup = ContenderFactory(loaded, store_set, self.model, self.decoding, self.sampling)
        lineup.choose_threads(methods, threads)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        surroundings = describe_environment(loaded, store_set)
        if rows:
            build = describe_build(rows, on_gpu=loaded.target.device.type == "cuda")
            surroundings |= {"llama_cpp": build["version"], BUILD_KEY: build}
        run = BenchRun(self.options(), methods, len(self.questions), surroundings, started)
        results = ResultFolder(folder, run, [question_id(question.id) for question in self.questions])
        contenders = lineup.contenders(methods, self.bench.assistant, rows)
        max_new_tokens = self.decoding.max_new_tokens
        bench = Bench(loaded, contenders, max_new_tokens, self.chat, self.bench.rounds, self.bench.drafters)
        bench.check(self.questions)
        self._answer(bench, results)

    def _check_methods(self, files: Mapping[str, Path]) -> list[str]:
        """Raise an error if a chosen method cannot be measured; return llama.cpp's contenders that can be measured."""
        chosen = self.bench.methods or ()
        obstacles = {name: exclusion_reason(name, files, self.model, self.sampling) for name in LLAMA_CPP}
        for name in chosen:
            if reason := obstacles.get(name):
                raise ModelError(f"{name} {reason}")
        if other_file := files.get(OTHER_FILE):
            check_file(other_file)
        if self._has_grammars and (excluded := [name for name in chosen if name in WITHOUT_GRAMMARS]):
            raise OptionError(f"{excluded[0]} cannot be measured on answers that follow a grammar: leave it out")
        return [name for name, reason in obstacles.items() if not reason]

    def _load(self, other_file: Path | None) -> tuple[Loaded, StoreSet]:
        """Load the model, which must be that of ``other_file`` if there is one, and open the stores."""
        chosen = {*(self.bench.methods or METHODS)}
        compile_ahead(self.model, *chosen)
        loaded = load(self.model)
        finish_compiling()
        databases = "".join(letter for letter in SOURCE_LETTERS if chosen & {*methods_with(letter)})
        store_set = loaded.store_opener(self.stores).open(databases)
        if other_file:
            check_same_model(other_file, loaded)
        return loaded, store_set

    def _methods(self, loaded: Loaded, store_set: StoreSet, llama_cpp: Sequence[str]) -> tuple[str, ...]:
        """Return the methods to measure; raise an error if the baseline isn't one of them."""
        trained = methods_with_drafters(self.decoding, loaded.target.model)
        has_corpus = store_set.corpus is not None
        methods = self.bench.chosen(
            has_corpus=has_corpus, trained=trained, llama_cpp=llama_cpp, grammars=self._has_grammars
        )
        baseline_of(methods, self.bench.baseline)
        return methods

    @property
    def _has_grammars(self) -> bool:
        return any(question.grammar for question in self.questions)

    def _answer(self, bench: Bench, results: ResultFolder) -> None:
        """Warm up, then answer the questions that have no result yet."""
        warm_up = warm_up_questions(self.questions, self.spare, self.bench.warm_up, bench.fits)
        left = self.questions[results.answered :]
        turns = len(bench.contenders) * (sum(map(turn_count, warm_up)) + self.bench.rounds * sum(map(turn_count, left)))
        with progress_bar(turns, "answers") as progress:
            bench.warm_up(warm_up, progress.advance)
            for answers in bench.answers(self.questions, results.answered, progress.advance):
                results.add(answers)
