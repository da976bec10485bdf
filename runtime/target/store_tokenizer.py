"""Finds the tokenizer that a store was built with, for commands on a store whose user names no model.

A manifest identifies a tokenizer by its fingerprint, so each candidate is loaded and compared; the folder in the
manifest only says where to look first. Code that comes with a model is not run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from hdtool.data.artifact import artifacts
from hdtool.data.errors import ModelError, StoreError
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_file_names import printable
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.gguf_folder import KIND
from hdtool.runtime.weights.hub import cached_snapshot


def model_of_store(store: Path, tokenizer: TokenizerFingerprint, model: Checkpoint | None = None) -> ModelConfig:
    """Return a configuration that loads a store's tokenizer; raise a ``StoreError`` if this machine lacks it.

    ``tokenizer`` and ``model`` are from the store's manifest. Nothing is downloaded.
    """
    for config in _candidates(tokenizer, model):
        with suppress(ModelError, OSError):
            if TokenizerFingerprint.of(load_tokenizer(config)) == tokenizer:
                return config
    raise StoreError(
        f"{store} was built with a tokenizer that is not found here ({printable(tokenizer.fingerprint)[:40]}, "
        f"{tokenizer.vocab_size:,} tokens): give the model that the store was built for with --model"
    )


def _candidates(tokenizer: TokenizerFingerprint, model: Checkpoint | None) -> Iterator[ModelConfig]:
    """Yield configurations whose tokenizer may be the store's, the most probable ones first."""
    if tokenizer.folder and Path(tokenizer.folder).is_dir():
        yield ModelConfig(tokenizer.folder)
    yield ModelConfig()
    for artifact in artifacts(KIND):
        if artifact.versions["transformers"] == metadata.version("transformers"):
            yield ModelConfig(str(artifact.folder))
    if model and (snapshot := cached_snapshot(model.name)):
        yield ModelConfig(str(snapshot))
