"""Who takes part in a benchmark: contenders by their names, all on one model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hdtool.data.errors import ModelError
from hdtool.data.stores.store import TokenizerFingerprint
from hdtool.runtime.config import PEERS, DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.environment import dtype_name
from hdtool.runtime.evaluation.contenders import Contender, Drafting, Generating
from hdtool.runtime.kernels.small_batch_linear import has_own_products, share_weights
from hdtool.runtime.model.load import Loaded, load_stock, load_tokenizer
from hdtool.runtime.stores.store_set import StoreSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOOKED_UP = 10
"""Tokens that the library's prompt lookup drafts, as its documentation and others' figures have it."""


class Lineup:
    """Makes the contenders.

    All of ours share the loaded target. The library's run on the same weights if these are as the
    checkpoint has them; where ours were laid out anew, which small models on CPUs are, they get a copy of
    the model that is as any user of the library would have it.
    """

    def __init__(
        self, loaded: Loaded, store_set: StoreSet, model: ModelConfig, decoding: DecodeConfig, sampling: SamplingConfig
    ) -> None:
        self._loaded = loaded
        self._shelf = store_set
        self._config = replace(model, device=str(loaded.target.device), dtype=dtype_name(loaded.target.dtype))
        self._decoding = decoding
        self._sampling = sampling

    def contenders(self, names: Sequence[str], assistant: str | None = None) -> dict[str, Contender]:
        """By their names, in the order of these."""
        found: dict[str, Contender] = {}
        stock = self._stock() if set(names) & set(PEERS) else None
        for name in names:
            if stock is not None and name in PEERS:
                found[name] = self._peer(name, stock, assistant)
            else:
                found[name] = self._ours(name)
        return found

    def _ours(self, name: str) -> Contender:
        drafter = drafter_for(replace(self._decoding, method=name), self._loaded.target, self._shelf)
        return Drafting(self._loaded, drafter, self._sampling, self._decoding.max_new_tokens)

    def _peer(self, name: str, stock: PreTrainedModel, assistant: str | None) -> Contender:
        drafting: dict[str, Any] = {}
        if name == "generate-pld":
            drafting = {"prompt_lookup_num_tokens": LOOKED_UP}
        elif name == "generate-assisted":
            drafting = self._assisting(stock, replace(self._config, model=assistant, quantise=None))
        return Generating(self._loaded, stock, self._sampling, self._decoding.max_new_tokens, **drafting)

    def _stock(self) -> PreTrainedModel:
        own: PreTrainedModel = self._loaded.target.model
        if not has_own_products(own):
            return own
        stock = load_stock(self._config)
        share_weights(stock, own)
        return stock

    def _assisting(self, stock: PreTrainedModel, config: ModelConfig) -> dict[str, Any]:
        tokenizer = load_tokenizer(config)
        ours, theirs = TokenizerFingerprint.of(self._loaded.tokenizer), TokenizerFingerprint.of(tokenizer)
        if ours != theirs:
            raise ModelError(
                f"{config.model} cannot assist {self._loaded.name}: its tokenizer is another one "
                f"({theirs.vocab_size:,} tokens, the model's has {ours.vocab_size:,}): "
                "name a draft model of the same family"
            )
        assistant = load_stock(config)
        found = {"assistant_model": assistant}
        if assistant.config.get_text_config().vocab_size == stock.config.get_text_config().vocab_size:
            return found
        # The same tokens in matrices padded to different sizes; the library takes them for different tokenizers.
        return found | {"tokenizer": self._loaded.tokenizer, "assistant_tokenizer": tokenizer}
