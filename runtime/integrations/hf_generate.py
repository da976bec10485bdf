"""hdtool's decoding loop inside ``model.generate`` of transformers, through ``custom_generate``."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import LogitsProcessorList, MaxLengthCriteria, StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hdtool.data.errors import OptionError
from hdtool.data.grammar import Grammar
from hdtool.runtime.config import DecodeConfig, SamplingConfig, StoresConfig
from hdtool.runtime.config.methods import HIERARCHIES
from hdtool.runtime.decode import decode
from hdtool.runtime.drafter import Drafter, HistoryDrafter, NoDraft
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.generate_settings import Stops
from hdtool.runtime.grammar.compiler import GrammarCompiler
from hdtool.runtime.grammar.guide import Guide
from hdtool.runtime.grammar.guided_drafter import guided
from hdtool.runtime.grammar.processor import GrammarProcessor
from hdtool.runtime.integrations.call_lock import CallLock
from hdtool.runtime.integrations.generate_request import GenerateRequest, predicted_ids
from hdtool.runtime.model.checkpoint.identity import checkpoint_in_memory
from hdtool.runtime.model.families import refuse_by_configuration
from hdtool.runtime.model.library import argument_of_generate, attention_of, must_pass_in_step, use_masked_attention
from hdtool.runtime.model.load import ends_of
from hdtool.runtime.model.placement import device_of
from hdtool.runtime.model.target import Target, embedded_tokens
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sampling.truncation import NOT_FINITE
from hdtool.runtime.sequence import Finish
from hdtool.runtime.stats import Stats
from hdtool.runtime.stores.store_set import NONE, StoreSet

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )
    from transformers.generation.streamers import BaseStreamer

Generated = GenerateDecoderOnlyOutput | torch.LongTensor
Maker = Callable[[Target], Drafter]
NESTED = (
    "a Generator is called from inside its own call of generate, as from a logits processor, a stopping criterion or a "
    "streamer: give the inner call a Generator of its own"
)
NO_PREDICTION = (
    "a prediction is given to generate, but this Generator's drafter does not use one: make it by Generator.drafting "
    f"with method {', '.join(HIERARCHIES)}, or leave the prediction out"
)


class Generator:
    """Makes ``model.generate`` decode by hdtool's loop, as its ``custom_generate``::

        model.generate(**inputs, max_new_tokens=100, custom_generate=Generator())

    Reuse it for all calls: it holds the KV cache and the result of checking the model. Calls of several threads are
    serialized; a nested call, as from a logits processor, needs its own generator.
    """

    def __init__(
        self, drafter: Drafter | Maker | None = None, *, seed: int | None = None, prefix_caching: bool = True
    ) -> None:
        """``drafter`` is a drafter or a function that makes one for a target; None is plain decoding.

        With ``prefix_caching``, a prompt that begins as the last conversation did is read from where it differs.

        Without a ``seed``, each sampled answer draws a seed from torch's generator, so ``torch.manual_seed`` makes a
        program reproducible.
        """
        self._make: Maker = drafter if callable(drafter) else lambda _: drafter or NoDraft()
        self._seed = seed
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._compiler: GrammarCompiler | None = None
        self._prefix_caching = prefix_caching
        self._calls = CallLock(NESTED)
        self._target: Target | None = None
        self._drafter: Drafter = NoDraft()
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
    ) -> Generator:
        """A generator that drafts as ``hdtool generate`` does: by a method, from the stores of the model."""
        config = decoding or DecodeConfig()
        chosen = store_set or StoresConfig()
        # Faults of stores that were named are raised here, and not by the first answer.
        named = StoresConfig(chosen.model_db or NONE, chosen.corpus_db or NONE)
        StoreSet.for_tokenizer(tokenizer, named, config.databases)

        def make(target: Target) -> Drafter:
            model = checkpoint_in_memory(target.model)
            stores = StoreSet.for_tokenizer(
                tokenizer, chosen, config.databases, model=model, identified=config.keeps_history
            )
            return drafter_for(config, target, stores)

        made = cls(make, seed=seed, prefix_caching=config.prefix_caching)
        made._tokenizer = tokenizer
        return made

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
        **model_arguments: Any,
    ) -> Generated:
        """Called by ``generate``; ``seed``, ``prediction`` and ``grammar`` can be passed through ``generate``.

        A ``prediction`` is token ids that the answer will probably have: they are drafted from, and never read by the
        model. The answer matches the ``grammar`` as a whole, unless it ends at ``max_new_tokens``.
        """
        refuse_by_configuration(model.config)
        request = GenerateRequest.of(
            input_ids,
            generation_config,
            stopping_criteria,
            model_arguments,
            model_type=model.config.model_type,
            synced_gpus=synced_gpus or _is_synced(model),
        )
        streamer = streamer or argument_of_generate("streamer")
        guide = self._guide(model, grammar) if grammar is not None else None
        if guide:
            logits_processor = LogitsProcessorList([GrammarProcessor(guide), *logits_processor])
        sampler = _Recorder(request, logits_processor, self._seed_for(request, seed), input_ids.device)
        predicted = predicted_ids(prediction)
        output: list[int] = []
        with self._calls.held(), _prepared(model):
            # The loop itself ends at the length, so that an answer cut there is told from one that stopped.
            others = StoppingCriteriaList(one for one in stopping_criteria if type(one) is not MaxLengthCriteria)
            stops = Stops((), others, sampler, sampler.device, lambda: sampler.scores_recorded)
            for tokens in self._steps(model, request, sampler, stops, predicted, guide):
                output += tokens
                if streamer is not None:
                    for token in tokens:
                        streamer.put(torch.tensor([token]))
        if streamer is not None:
            streamer.end()
        sequences = torch.cat([input_ids, input_ids.new_tensor([output])], dim=-1)
        if not request.wants_details:
            return cast(torch.LongTensor, sequences)
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, sequences),
            scores=cast(Any, sampler.scores_recorded),
            logits=cast(Any, sampler.logits_recorded),
        )

    def _steps(
        self,
        model: PreTrainedModel,
        request: GenerateRequest,
        sampler: _Recorder,
        stops: Stops,
        prediction: Sequence[int],
        guide: Guide | None,
    ) -> Iterator[list[int]]:
        target = self._target_for(model)
        self.stats = Stats()
        if prediction and not isinstance(self._drafter, HistoryDrafter):
            raise OptionError(NO_PREDICTION)
        drafter = guided(self._drafter, guide)
        steps = decode(
            target,
            request.prompt,
            sampler,
            max_new_tokens=request.most,
            stops=stops,
            drafter=drafter,
            prediction=prediction,
            prefix_caching=self._prefix_caching,
        )
        for step in self.stats.counted(steps, drafter):
            yield step.tokens
        if self.stats.finish is Finish.CONTEXT:
            warnings.warn("the answer ends early: the model's context is full", stacklevel=4)

    def _guide(self, model: PreTrainedModel, grammar: Grammar) -> Guide:
        """The state of a new answer in its grammar."""
        if self._tokenizer is None:
            raise OptionError("a grammar needs the model's tokenizer: make the Generator by Generator.drafting")
        vocabulary = embedded_tokens(model)
        if self._compiler is None or self._compiler.vocabulary < vocabulary:
            ends = ends_of(model.generation_config.eos_token_id, self._tokenizer)
            self._compiler = GrammarCompiler(self._tokenizer, ends, vocabulary)
        return self._compiler.guide(grammar)

    def _target_for(self, model: PreTrainedModel) -> Target:
        """The target of the last call, or a new one for another model, device, dtype or size of the embeddings.

        The target itself notices other changes, such as adapters, and the drafter keeps what it has learned.
        """
        target = self._target
        # Not model.device, which differs for offloaded weights.
        now = device_of(model), model.dtype, embedded_tokens(model)
        if target is None or target.model is not model or (target.device, target.dtype, target.vocabulary) != now:
            self._target = target = None  # frees the old cache first
            self._target = target = Target(model)
            self._drafter = self._make(target)
        return target

    def _seed_for(self, request: GenerateRequest, seed: int | None) -> int:
        given = seed if seed is not None else self._seed
        if given is None and request.draws:
            return int(torch.randint(2**63 - 1, ()))
        return given or 0


class _Recorder(Sampler):
    """A sampler with the processors of ``generate`` that records scores and logits for its output object."""

    def __init__(
        self, request: GenerateRequest, processors: LogitsProcessorList, seed: int, device: torch.device
    ) -> None:
        # The processors apply the temperature; 1 only selects sampling.
        config = SamplingConfig(temperature=1.0 if request.draws else 0.0, seed=seed)
        super().__init__(config, request.prompt, processors=processors, padding=request.padding)
        self.device = device
        """The device of the prompt, and of the tensors of processors and criteria."""
        self.scores_recorded: tuple[torch.Tensor, ...] | None = () if request.wants_scores else None
        self.logits_recorded: tuple[torch.Tensor, ...] | None = () if request.wants_logits else None
        if request.wants_scores or request.wants_logits:
            self.walks = self.takes_the_only_token = False
            self.first_mask = self.draws = None

    def chooser(self, logits: torch.Tensor, *, finite_only: bool = False) -> Callable[[int], int]:
        return super().chooser(logits.to(self.device), finite_only=finite_only)

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        before = self.processed(logits[row], self.before)
        token = self.choose(before)
        if token == NOT_FINITE:  # the row is computed again, or none is
            return token
        if self.logits_recorded is not None:
            self.logits_recorded += (logits[row : row + 1].to(torch.float32, copy=True),)
        if self.scores_recorded is not None:
            scores = self.processed(before, self.truncating)
            self.scores_recorded += (scores.to(torch.float32, copy=True)[None],)
        return token


@contextmanager
def _prepared(model: PreTrainedModel) -> Iterator[None]:
    """Set the model up for a target; restore its training mode and attention implementation at the end."""
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
    """Whether other processes synchronize in each pass of the model, by the criterion of ``generate``."""
    given = argument_of_generate("synced_gpus")
    return must_pass_in_step(model) if given is None else bool(given)
