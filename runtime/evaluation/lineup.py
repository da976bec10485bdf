"""The contenders of a benchmark by name, all on one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hdtool.data.errors import ModelError
from hdtool.data.stores.store import TokenizerFingerprint
from hdtool.runtime.budget.measure_passes import cost_here
from hdtool.runtime.budget.node_budget import FixedBudget, MeasuredBudget
from hdtool.runtime.budget.pass_costs import MeasuredCosts
from hdtool.runtime.config import LLAMA_CPP, PEERS, DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.drafters.methods import drafter_within
from hdtool.runtime.environment import dtype_name
from hdtool.runtime.evaluation.contenders import Contender, DraftingContender, GenerateContender
from hdtool.runtime.evaluation.llama_cpp_peer import LlamaCppContender
from hdtool.runtime.evaluation.replay import with_own_history
from hdtool.runtime.kernels.linear import has_compiled_layers, share_weights
from hdtool.runtime.model.load import Loaded, load_stock, load_tokenizer
from hdtool.runtime.stores.store_set import StoreSet

GENERATE = set(PEERS) - set(LLAMA_CPP)
PROMPT_LOOKUP_TOKENS = 10
"""Tokens that ``generate`` drafts by prompt lookup: the number in the documentation of transformers."""


class Lineup:
    """Makes the contenders.

    hdtool's methods share the loaded target. ``generate`` runs on the same model, unless hdtool replaced its linear
    layers, as it does for small models on CPUs: then ``generate`` runs on a stock model that shares the weights.
    llama.cpp reads the weights from a GGUF file itself.
    """

    def __init__(
        self, loaded: Loaded, store_set: StoreSet, model: ModelConfig, decoding: DecodeConfig, sampling: SamplingConfig
    ) -> None:
        self._loaded = loaded
        self._store_set = store_set
        self._config = replace(model, device=str(loaded.target.device), dtype=dtype_name(loaded.target.dtype))
        self._decoding = decoding
        self._sampling = sampling

    def contenders(
        self, names: Sequence[str], assistant: str | None = None, llama_cpp: Mapping[str, Path] | None = None
    ) -> dict[str, Contender]:
        """Contenders by name, in the order of the names; ``llama_cpp`` has the files of its rows."""
        found: dict[str, Contender] = {}
        stock = self._stock() if set(names) & GENERATE else None
        for name in names:
            if stock is not None and name in GENERATE:
                found[name] = self._peer(name, stock, assistant)
            elif name in LLAMA_CPP:
                file, lookup = (llama_cpp or {})[name], name == "llama.cpp-pld"
                found[name] = LlamaCppContender(self._loaded, file, self._decoding.max_new_tokens, lookup=lookup)
            else:
                new = partial(self._new_drafter, replace(self._decoding, method=name))
                most = self._decoding.max_new_tokens
                found[name] = DraftingContender(
                    self._loaded, new(), self._sampling, most, new, self._decoding.draft_tokens
                )
        return found

    @cached_property
    def _costs(self) -> MeasuredCosts:
        """Passes are timed once for all drafters."""
        target = self._loaded.target
        return MeasuredCosts(target.log, cost_here(target), only_timed_sizes=target.captures)

    def _new_drafter(self, config: DecodeConfig) -> Drafter:
        """A drafter with an empty history of its own."""
        target = self._loaded.target

        def budget() -> FixedBudget | MeasuredBudget:
            return (
                MeasuredBudget(target.log, self._costs)
                if config.draft_tokens is None
                else FixedBudget(config.draft_tokens)
            )

        return drafter_within(budget, config, with_own_history(self._store_set, config), target)

    def _peer(self, name: str, stock: PreTrainedModel, assistant: str | None) -> Contender:
        drafting: dict[str, Any] = {}
        if name == "generate-pld":
            drafting = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
        elif name == "generate-assisted":
            drafting = self._assistant_options(
                stock, replace(self._config, model=assistant, gguf_file=None, quantization=None)
            )
        return GenerateContender(self._loaded, stock, self._sampling, self._decoding.max_new_tokens, **drafting)

    def _stock(self) -> PreTrainedModel:
        own: PreTrainedModel = self._loaded.target.model
        if not has_compiled_layers(own):
            return own
        stock = load_stock(self._config)
        share_weights(stock, own)
        return stock

    def _assistant_options(self, stock: PreTrainedModel, config: ModelConfig) -> dict[str, Any]:
        tokenizer = load_tokenizer(config)
        own, other = TokenizerFingerprint.of(self._loaded.tokenizer), TokenizerFingerprint.of(tokenizer)
        if own != other:
            raise ModelError(
                f"{config.model} cannot assist {self._loaded.name}: its tokenizer is another one "
                f"({other.vocab_size:,} tokens, the model's has {own.vocab_size:,}): "
                "name a draft model of the same family"
            )
        assistant = load_stock(config)
        found = {"assistant_model": assistant}
        if assistant.config.get_text_config().vocab_size == stock.config.get_text_config().vocab_size:
            return found
        # The embeddings are padded to different sizes, which transformers takes for different tokenizers.
        return found | {"tokenizer": self._loaded.tokenizer, "assistant_tokenizer": tokenizer}
