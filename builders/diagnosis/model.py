"""Checks of a model: whether it would load and what it would draft from. No weights are loaded or downloaded."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from hdtool.builders.diagnosis.finding import MEND, NOTE, Finding
from hdtool.builders.diagnosis.machine import available_memory
from hdtool.data.errors import HdtoolError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store import read_manifest
from hdtool.data.tally import counted
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.model.checkpoint.identity import checkpoint_of
from hdtool.runtime.model.checkpoint.place import place_of
from hdtool.runtime.model.checkpoint.weight_files import weight_files
from hdtool.runtime.model.families import refuse_by_configuration, without_trees
from hdtool.runtime.model.gguf.slow_weights import slow_weights
from hdtool.runtime.model.gguf.which_file import gguf_file
from hdtool.runtime.model.load import load_settings, load_tokenizer, pick_device
from hdtool.runtime.model.quantization import library_of, require_libraries
from hdtool.runtime.stores.store_set import corpus_index_for, model_store_for

BYTES_IN_FLOAT32 = 2.0
"""Most checkpoints have 16-bit numbers, and processors compute in 32 bits."""


def model_findings(config: ModelConfig) -> Iterator[Finding]:
    """The findings up to the first one without which the others cannot be made."""
    try:
        folder = place_of(config)
        yield Finding("files", str(folder))
        settings = load_settings(config)
        refuse_by_configuration(settings)
        if reason := without_trees(settings):
            yield Finding("family", f"{settings.model_type}, which verifies chains of drafts, as this one {reason}")
        else:
            yield Finding("family", f"{settings.model_type}, which can verify draft trees as far as its settings show")
        if library := library_of(settings):
            require_libraries(config.name, settings, None)
            yield Finding("quantized", f"by {library}, whose packages are there")
        yield from _weights(config, folder)
        yield from _tokenizer(config)
    except HdtoolError as error:
        yield Finding("model", str(error), MEND)


def _weights(config: ModelConfig, folder: Path) -> Iterator[Finding]:
    if file := gguf_file(config):
        slow = slow_weights(GGUFHeader.read(file)) if pick_device("auto").type == "cpu" else None
        if slow:
            yield Finding("weights", f"in the GGUF file; {slow}", NOTE, "take a file in Q8_0, Q4_K_M or Q4_0")
        else:
            yield Finding("weights", "in the GGUF file; they are read once, when they are first needed")
        return
    files = weight_files(folder)
    if not files:
        yield _no_weights(config)
        return
    size = sum(file.stat().st_size for file in files)
    found = f"{size / 1e9:.2f} GB in {counted(len(files), 'file')}"
    needed, available = size * BYTES_IN_FLOAT32, available_memory()
    if pick_device("auto").type == "cpu" and available and needed > available:
        advice = "take --dtype bfloat16, --quantization q8_0 or int8, or a smaller model"
        yield Finding("weights", f"{found}, {needed / 1e9:.1f} GB in float32: more than the memory", NOTE, advice)
    else:
        yield Finding("weights", found)


def _no_weights(config: ModelConfig) -> Finding:
    if config.model and Path(config.model).expanduser().is_dir():
        advice = "get the folder again, whole: model.safetensors, or all shards of its index"
        return Finding("weights", "missing or not whole", MEND, advice)
    return Finding("weights", "not downloaded yet", NOTE, f"hf download {config.model}, or the first answer does it")


def _tokenizer(config: ModelConfig) -> Iterator[Finding]:
    tokenizer = load_tokenizer(config)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    yield Finding("tokenizer", f"{fingerprint.fingerprint}, {fingerprint.vocab_size:,} tokens")
    if getattr(tokenizer, "chat_template", None):
        yield Finding("chat template", "there: prompts are put into it")
    else:
        yield Finding("chat template", "none: prompts are continued as text, as by a base model", NOTE)
    yield _model_store(config, checkpoint_of(config), fingerprint)
    if corpus := corpus_index_for(fingerprint):
        yield Finding("corpus index", _described(corpus))
    else:
        advice = f"hdtool build-corpus-db --model {shlex.quote(config.name)} texts/"
        yield Finding("corpus index", "none", NOTE, advice)


def _model_store(config: ModelConfig, model: Checkpoint | None, tokenizer: TokenizerFingerprint) -> Finding:
    if found := model_store_for(model, tokenizer):
        return Finding("model store", _described(found))
    advice = f"hdtool build-model-db --model {shlex.quote(config.name)} --from answers.jsonl"
    return Finding("model store", "none of this model" if model else "none, as the weights are not here", NOTE, advice)


def _described(folder: Path) -> str:
    return f"{folder}, {read_manifest(folder).counts['tokens']:,} tokens"
