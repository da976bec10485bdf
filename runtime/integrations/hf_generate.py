"""Runs hdtool's decoding loop inside ``model.generate`` of transformers, through ``custom_generate``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch
from transformers import (
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hdtool.data.errors import OptionError
from hdtool.data.prompts import Grammar
from hdtool.runtime.answering.answer_plan import AnswerPlan, criteria_and_ends
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.sampler import Criterion, Sampler, Shortcuts, seed_of
from hdtool.runtime.core.session import Session
from hdtool.runtime.core.step import Finish, Stats, Step
from hdtool.runtime.core.top_k_top_p import NOT_FINITE
from hdtool.runtime.drafters.deferred import deferred
from hdtool.runtime.drafters.drafter_factory import drafters_for
from hdtool.runtime.engines.stock.stock_model import embedded_tokens
from hdtool.runtime.generation.grammar import GrammarCompiler, GrammarProcessor, Guide
from hdtool.runtime.integrations.generate_request import GenerateRequest, Rollouts, UnsupportedCallError, predictions_of
from hdtool.runtime.kernels.compile_process import DRAFTER, start_compiling
from hdtool.runtime.model.devices import device_of
from hdtool.runtime.model.refusals import refuse_by_configuration
from hdtool.runtime.model.transformers_internals import (
    argument_of_generate,
    attention_of,
    must_pass_in_step,
    processor_of_row,
    use_masked_attention,
)
from hdtool.runtime.settings.decoding import HIERARCHIES, DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_opener import StoreOpener
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, ends_of, target_of_loaded
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.model_in_memory import checkpoint_in_memory

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


class CallLock:
    """Serializes calls from several threads; raises OptionError on a nested call, which would deadlock."""

    def __init__(self, nested: str) -> None:
        """``nested`` is the error message for nested calls."""
        self._nested = nested
        self._lock = Lock()
        self._thread: int | None = None

    def __reduce__(self) -> tuple[type[CallLock], tuple[str]]:
        """Support copying and pickling; a copy is unlocked."""
        return CallLock, (self._nested,)

    @contextmanager
    def held(self) -> Iterator[None]:
        if self._thread == get_ident():
            raise OptionError(self._nested)
        with self._lock:
            self._thread = get_ident()
            try:
                yield
            finally:
                self._thread = None


Generated = GenerateDecoderOnlyOutput | torch.LongTensor
MakeDrafter = Callable[[Target], Drafter]
DraftersMaker = Callable[[Target, int], list[Drafter]]
STREAMER_ERROR = (
    "hdtool cannot decode this call of generate: a streamer is given, but it shows one answer and the batch has more"
)
STOP_STRINGS_ERROR = (
    "hdtool cannot decode this call of generate: stop_strings are given, but transformers does not pass the tokenizer "
    "on to custom_generate: make the Generator by Generator.drafting(tokenizer) or Generator(tokenizer=…), or give "
    "stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]"
)
SINGLE_DRAFTER_ERROR = (
    "a batch is given to a Generator with one drafter, but each row needs its own: give the Generator a function that "
    "makes a drafter for a target, or make it by Generator.drafting"
)
NESTED_CALL_ERROR = (
    "a Generator is called from inside its own call of generate, as from a logits processor, a stopping criterion or a "
    "streamer: give the inner call a Generator of its own"
)
PREDICTION_ERROR = (
    "a prediction is given to generate or made of rollouts, but this Generator's drafter does not use one: make it by "
    f"Generator.drafting with method {', '.join(HIERARCHIES)}, or leave it out"
)


class Generator:
    """A ``custom_generate`` that makes ``model.generate`` decode with hdtool's loop::

        model.generate(**inputs, max_new_tokens=100, custom_generate=Generator())

    Reuse one generator for all calls: it holds the KV cache and the result of checking the model. Calls from several
    threads are serialized. A nested call, such as one from a logits processor, needs a generator of its own.
    """

    def __init__(
        self,
        drafter: Drafter | MakeDrafter | None = None,
        *,
        seed: int | None = None,
        prefix_caching: bool = True,
        rollouts: int = 0,
        tokenizer: PreTrainedTokenizerBase | None = None,
        drafters: DraftersMaker | None = None,
    ) -> None:
        """``drafter`` is a drafter or a function that makes one for a target; None selects plain decoding.

        ``drafters``, if given, makes the drafters of all rows instead. Grammars and stop strings need the tokenizer.

        With ``prefix_caching``, the prefix that a prompt shares with the last conversation is not prefilled again.

        ``rollouts`` is the maximum number of answer tokens to keep, for all prompts together. If a prompt is repeated,
        its earlier answers are used to draft the new answer.

        Without a ``seed``, each sampled call draws a seed from torch's generator, so ``torch.manual_seed`` makes a
        program reproducible. The first row of a batch uses the call's seed, the other rows use seeds derived from it.
        """
        self._make = drafters or partial(_drafters_of, drafter)
        self._seed = seed
        self._tokenizer = tokenizer
        self._compiler: GrammarCompiler | None = None
        self._prefix_caching = prefix_caching
        self._calls = CallLock(NESTED_CALL_ERROR)
        self._rollouts = Rollouts(rollouts)
        self._target: Target | None = None
        self._drafters: dict[int, list[Drafter]] = {}
        """Maps the number of rows in a call to one drafter per row."""
        self.stats = Stats()
        """Statistics of the last call."""

    @classmethod
    def drafting(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        decoding: DecodeConfig | None = None,
        store_set: StoresConfig | None = None,
        *,
        seed: int | None = None,
        rollouts: int = 0,
    ) -> Generator:
        """Make a generator that drafts from the model's stores, as ``hdtool generate`` does.

        Raise StoreError at once for named stores that cannot be used; default stores are opened by the first call.
        """
        config = decoding or DecodeConfig()
        # Raises errors of named stores here, and not in the first call.
        StoreOpener("", tokenizer, None, store_set or StoresConfig()).check_named(config.databases)
        if config.method in HIERARCHIES:
            start_compiling(DRAFTER)

        opened: WeakKeyDictionary[Target, StoreSet] = WeakKeyDictionary()

        def make(target: Target, rows: int) -> list[Drafter]:
            if target not in opened:  # all drafters of a target share its history
                loaded = Loaded("", target, tokenizer, checkpoint_in_memory(target.model))
                opened[target] = loaded.store_opener(store_set).open_for(config)
            batched = replace(config, batch_size=rows)
            return deferred(config.method, lambda: drafters_for(batched, target, opened[target]), rows)

        caching = config.prefix_caching
        return cls(seed=seed, prefix_caching=caching, rollouts=rollouts, tokenizer=tokenizer, drafters=make)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        seed: int | None = None,
        prediction: Sequence[int] | torch.Tensor | None = None,
        grammar: Grammar | None = None,
        stop_strings: str | list[str] | None = None,
        **model_arguments: Any,
    ) -> Generated:
        """Decode a call of ``generate``; raise UnsupportedCallError if the loop cannot decode it.

        ``seed``, ``prediction``, ``grammar`` and ``stop_strings`` are arguments of that call. transformers does not
        pass on the call's ``tokenizer``, so a grammar and stop strings need a generator that was made with one.

        ``prediction`` holds token ids that the answer will probably contain: the drafter drafts from them, and they
        are not part of the context. The whole answer matches the ``grammar``, unless it reaches ``max_new_tokens`` or
        fills the context. In a batch, each row may have its own prediction, and processors and criteria are called
        with one row at a time.
        """
        refuse_by_configuration(model.config)
        requests = GenerateRequest.rows_of(
            input_ids,
            generation_config,
            stopping_criteria,
            model_arguments,
            model_type=model.config.model_type,
            synced_gpus=synced_gpus or _is_synced(model),
        )
        streamer = streamer or argument_of_generate("streamer")
        if streamer is not None and len(requests) > 1:
            raise UnsupportedCallError(STREAMER_ERROR)
        first_seed, predictions = self._seed_for(requests[0], seed), predictions_of(prediction, len(requests))
        criteria = StoppingCriteriaList(stopping_criteria)
        if stop_strings:
            criteria.append(self._stop_criterion(stop_strings))
        met, ends = criteria_and_ends(criteria, input_ids.device, lambda sampler: sampler.scores_recorded)
        with self._calls.held(), _prepared(model):
            rows = []
            for number, request in enumerate(requests):
                guide = self._guide(model, grammar) if grammar is not None else None
                processors = _processors_of_row(logits_processor, number, len(requests))
                if guide:
                    processors.insert(0, GrammarProcessor(guide))
                sampler = _Recorder(request, processors, seed_of(first_seed, number) % 2**63, input_ids.device, met)
                predicted = self._rollouts.prediction(request.prompt, predictions[number])
                plan = AnswerPlan(request.prompt, sampler, request.max_new_tokens, ends, guide)
                rows.append(_Row(request, sampler, plan, predicted))
            for row, step in self._steps(model, rows):
                row.output += step.tokens
                if streamer is not None:
                    for token in step.tokens:
                        streamer.put(torch.tensor([token]))
            for row in rows:
                self._rollouts.add(row.request.prompt, row.output)
        if streamer is not None:
            streamer.end()
        return _output(input_ids, rows, _padding_token(generation_config))

    def _steps(self, model: PreTrainedModel, rows: Sequence[_Row]) -> Iterator[tuple[_Row, Step]]:
        """Generate all answers, and yield each step with its row; raise OptionError for an unusable prediction."""
        target = self._target_for(model)
        if len(rows) not in self._drafters:
            self._drafters[len(rows)] = self._make(target, len(rows))
        drafters = self._drafters[len(rows)]
        cache = target.cache if len(rows) == 1 else target.allocate(len(rows))
        session = Session[_Row](target, cache, prefixes=PrefixCache() if self._prefix_caching else None)
        additions = []
        for row, drafter in zip(rows, drafters, strict=True):
            if (row.prediction or self._rollouts) and not drafter.predicts:
                raise OptionError(PREDICTION_ERROR)
            request = row.plan.request(row, drafter, row.prediction)
            additions.append(row.stats.timing(request.drafter))
            session.submit(request)
        self.stats = rows[0].stats
        try:
            for request, step in session.steps():
                request.key.stats.add(step)
                yield request.key, step
        finally:
            for add_seconds in additions:
                add_seconds()
            if len(rows) > 1:
                self.stats = Stats.total(row.stats for row in rows)
        if any(row.stats.finish is Finish.CONTEXT for row in rows):
            warnings.warn("the answer ends early: the model's context is full", stacklevel=4)

    def _stop_criterion(self, strings: str | list[str]) -> StopStringCriteria:
        if self._tokenizer is None:
            raise UnsupportedCallError(STOP_STRINGS_ERROR)
        return StopStringCriteria(self._tokenizer, strings)

    def _guide(self, model: PreTrainedModel, grammar: Grammar) -> Guide:
        """Return the initial state of an answer's grammar; raise OptionError if this generator has no tokenizer."""
        if self._tokenizer is None:
            raise OptionError(
                "a grammar needs the model's tokenizer: give the Generator tokenizer=… or make it by Generator.drafting"
            )
        vocabulary = embedded_tokens(model)
        if self._compiler is None or self._compiler.vocabulary < vocabulary:
            ends = ends_of(model.generation_config.eos_token_id, self._tokenizer)
            self._compiler = GrammarCompiler(self._tokenizer, ends, vocabulary)
        return self._compiler.guide(grammar)

    def _target_for(self, model: PreTrainedModel) -> Target:
        """Return the target of the last call, or a new one if the model, device, dtype or vocabulary has changed.

        A target itself detects other changes, such as changes of adapters; the drafters then keep what they learned.
        """
        target = self._target
        # Not model.device, which differs for offloaded weights.
        identity = device_of(model), model.dtype, embedded_tokens(model)
        if target is None or target.model is not model or (target.device, target.dtype, target.vocabulary) != identity:
            self._target = target = None  # frees the old cache first
            if (target := target_of_loaded(model)) is None:
                target = Target(model)
                target.compile()  # succeeds for models that ``load`` returned for a CPU
            self._target = target
            self._drafters.clear()
        return target

    def _seed_for(self, request: GenerateRequest, seed: int | None) -> int:
        given = seed if seed is not None else self._seed
        if given is None and request.draws:
            return int(torch.randint(2**63 - 1, ()))
        return given or 0


@dataclass(eq=False)
class _Row:
    """One row of a call: its request, how its tokens are chosen, and its output."""

    request: GenerateRequest
    sampler: _Recorder
    plan: AnswerPlan
    prediction: list[int]
    output: list[int] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)


class _Recorder(Sampler):
    """Samples with the processors of ``generate``, and records the scores and logits that the call returns."""

    def __init__(
        self,
        request: GenerateRequest,
        processors: LogitsProcessorList,
        seed: int,
        device: torch.device,
        criteria: Sequence[Criterion] = (),
    ) -> None:
        # The processors apply the temperature; 1 only selects sampling.
        config = SamplingConfig(temperature=1.0 if request.draws else 0.0, seed=seed)
        super().__init__(config, request.prompt, processors=processors, padding=request.padding, criteria=criteria)
        self.device = device
        """Device of the prompt, on which processors and criteria run."""
        self.scores_recorded: tuple[torch.Tensor, ...] | None = () if request.wants_scores else None
        self.logits_recorded: tuple[torch.Tensor, ...] | None = () if request.wants_logits else None
        if request.wants_scores or request.wants_logits:
            self.shortcuts = Shortcuts()

    def chooser(self, logits: torch.Tensor, **known: Any) -> Callable[[int], int]:
        return super().chooser(logits.to(self.device), **known)

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        partial_scores = self.processed(logits[row], self.pre_processors)
        token = self.choose(partial_scores)
        if token == NOT_FINITE:  # the row is recomputed, so it is not recorded yet
            return token
        if self.logits_recorded is not None:
            self.logits_recorded += (logits[row : row + 1].to(torch.float32, copy=True),)
        if self.scores_recorded is not None:
            scores = self.processed(partial_scores, self.truncating_processors)
            self.scores_recorded += (scores.to(torch.float32, copy=True)[None],)
        return token


def _drafters_of(drafter: Drafter | MakeDrafter | None, target: Target, rows: int) -> list[Drafter]:
    """Return one drafter per row; raise OptionError if a single drafter is given for several rows."""
    if drafter is None:
        return [NoDraft() for _ in range(rows)]
    if callable(drafter):
        return [drafter(target) for _ in range(rows)]
    if rows > 1:
        raise OptionError(SINGLE_DRAFTER_ERROR)
    return [drafter]


def _processors_of_row(processors: LogitsProcessorList, row: int, rows: int) -> LogitsProcessorList:
    """Return the processors to use for one row of a batch.

    Raise UnsupportedCallError for a processor whose state cannot be split by rows.
    """
    if rows == 1:
        return LogitsProcessorList(processors)
    chosen = LogitsProcessorList()
    for processor in processors:
        alone = processor_of_row(processor, row)
        if alone is None:
            name = type(processor).__name__
            raise UnsupportedCallError(
                f"hdtool cannot decode this call of generate: {name} is used in a batch, but it has a state of all rows"
            )
        chosen.append(alone)
    return chosen


def _padding_token(settings: GenerationConfig) -> int:
    """Return the token that ``generate`` writes after the end of shorter rows."""
    ends = settings.eos_token_id
    first = ends[0] if isinstance(ends, list) and ends else ends
    return next((int(token) for token in (settings.pad_token_id, first) if isinstance(token, int)), 0)


def _output(input_ids: torch.LongTensor, rows: Sequence[_Row], padding: int) -> Generated:
    longest = max(len(row.output) for row in rows)
    answers = [[*row.output, *[padding] * (longest - len(row.output))] for row in rows]
    sequences = torch.cat([input_ids, input_ids.new_tensor(answers)], dim=-1)
    if not rows[0].request.wants_details:
        return cast(torch.LongTensor, sequences)
    return GenerateDecoderOnlyOutput(
        sequences=cast(torch.LongTensor, sequences),
        scores=cast(Any, _stacked([row.sampler.scores_recorded for row in rows], longest)),
        logits=cast(Any, _stacked([row.sampler.logits_recorded for row in rows], longest)),
    )


def _stacked(recorded: Sequence[tuple[torch.Tensor, ...] | None], longest: int) -> tuple[torch.Tensor, ...] | None:
    """Return one tensor ``[rows, vocabulary]`` per new token, with zeros in rows that have ended.

    Return None if nothing was to be recorded, and an empty tuple if a row recorded nothing.
    """
    rows = [row for row in recorded if row]
    if not rows or len(rows) < len(recorded):
        return None if recorded[0] is None else ()
    zeros = torch.zeros_like(rows[0][0])
    return tuple(torch.cat([row[index] if index < len(row) else zeros for row in rows]) for index in range(longest))


@contextmanager
def _prepared(model: PreTrainedModel) -> Iterator[None]:
    """Prepare the model for decoding; on exit, restore its training mode and attention implementation."""
    training = [module for module in model.modules() if module.training]
    attention = attention_of(model.config)
    try:
        model.eval()
        use_masked_attention(model)
        yield
    finally:
        for module in training:
            module.training = True
        if attention_of(model.config) != attention:
            model.set_attn_implementation(attention)


def _is_synced(model: PreTrainedModel) -> bool:
    """Return True if ``generate`` would synchronize every pass of the model with other processes."""
    given = argument_of_generate("synced_gpus")
    return must_pass_in_step(model) if given is None else bool(given)
