"""Checks of ``hdtool doctor``: packages, machine, folders, stores, a model and a short answer."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from stat import S_ISREG

import torch
from packaging.requirements import Requirement

from hdtool.data import demo
from hdtool.data.errors import HdtoolError, error_reason, install_command, pip_install, requirements
from hdtool.data.home import home
from hdtool.data.memory import available_memory
from hdtool.data.progress import abbreviated, count_of
from hdtool.data.prompts import Prompt
from hdtool.data.stores.kinds import MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.stores_at_home import StoredItem, stored_items
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.kernels.code_folder import code_folder, is_compiled
from hdtool.runtime.kernels.compile_process import NOUNS, PARTS
from hdtool.runtime.kernels.compiled import processor_name
from hdtool.runtime.model.quantization import library_of, require_libraries
from hdtool.runtime.model.refusals import refuse_by_configuration, without_trees
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import corpus_index_for, model_store_for
from hdtool.runtime.target.load import load_settings, load_tokenizer, pick_device
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of, place_of
from hdtool.runtime.weights.gguf_file import GGUFFile, gguf_file
from hdtool.runtime.weights.gguf_formats import slow_weights
from hdtool.runtime.weights.hub import weight_files

OK, NOTE, FIX = "ok", "note", "mend"
"""States of a finding: nothing to do, worth knowing, or broken until fixed."""


@dataclass(frozen=True)
class Finding:
    """Result of one check, and how to fix what is wrong."""

    name: str
    found: str
    state: str = OK
    advice: str = ""
    """Command or step that fixes the problem."""
    bytes: int | None = None
    """Size of the files in the checked folder; None if the check measures no folder."""


IMPORT_CHECKED = ("numba", "transformers", "datasets", "lmdb")
"""Packages whose import fails if a dependency is too new or too old for them."""
EXTRAS = {
    "quantized": "quantized weights",
    "vllm": "hdtool serve --engine vllm",
    "ray": "builds on a cluster",
}
VERSIONS_SHOWN = ("torch", "transformers", "numba")


def package_findings() -> Iterator[Finding]:
    yield Finding("hdtool", metadata.version("hdtool"))
    for name in VERSIONS_SHOWN:
        if (version := _version(name)) is not None:
            yield Finding(name, version)
    yield from _version_conflicts(requirements())
    yield from _broken_imports()
    for extra, purpose in EXTRAS.items():
        yield _extra(extra, purpose, requirements(extra))


def _version_conflicts(needed: list[Requirement]) -> Iterator[Finding]:
    faults = [(requirement, _version(requirement.name)) for requirement in needed if not _fits(requirement)]
    for requirement, version in faults:
        fault = (
            f"{version}, and {requirement.specifier} is needed" if version else f"missing, and {requirement} is needed"
        )
        yield Finding(requirement.name, fault, FIX, pip_install([requirement]))
    if not faults:
        yield Finding("others", f"all {len(needed)} packages that hdtool needs are there, in versions that fit")


def _broken_imports() -> Iterator[Finding]:
    for name in IMPORT_CHECKED:
        try:
            import_module(name)
        except Exception as error:  # extension modules raise many kinds of errors
            yield Finding(name, f"cannot be imported ({error_reason(error)})", FIX, f"pip install --upgrade {name}")


def _extra(extra: str, purpose: str, parts: list[Requirement]) -> Finding:
    lacking = [requirement.name for requirement in parts if _version(requirement.name) is None]
    command = install_command(extra)
    if lacking:
        return Finding(f"[{extra}]", f"{purpose}: not installed ({', '.join(lacking)})", NOTE, command)
    if conflicts := [
        f"{requirement.name} {_version(requirement.name)}" for requirement in parts if not _fits(requirement)
    ]:
        return Finding(f"[{extra}]", f"{purpose}: {', '.join(conflicts)} does not fit", FIX, command)
    installed = ", ".join(f"{requirement.name} {_version(requirement.name)}" for requirement in parts)
    return Finding(f"[{extra}]", f"{purpose}: {installed}")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(requirement: Requirement) -> bool:
    version = _version(requirement.name)
    return version is not None and requirement.specifier.contains(version, prereleases=True)


DRIVER_PROGRAMS = ("nvidia-smi", "rocm-smi")
"""Programs that are installed along with GPU drivers."""
TORCH_PAGE = "https://pytorch.org/get-started/locally"


def machine_findings() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} in {sys.prefix}")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("processor", f"{processor_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}")
    if available := available_memory():
        yield Finding("memory", f"{available / 1e9:.1f} GB available")
    yield from _devices()
    yield _threads()


def _devices() -> Iterator[Finding]:
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        yield Finding(f"cuda:{number}", f"{name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    if torch.cuda.is_available():
        return
    if torch.backends.mps.is_available():
        yield Finding("mps", "the GPU of this Mac")
    elif driver := next(filter(shutil.which, DRIVER_PROGRAMS), None):
        yield Finding(
            "GPU",
            f"{driver} is here, and torch {torch.__version__} sees no GPU",
            FIX,
            f"install the torch for your driver: {TORCH_PAGE}",
        )
    else:
        yield Finding("GPU", "none: models run on the processor")


def _threads() -> Finding:
    measured = sum(1 for _ in (home() / "costs").glob("*/*.json"))
    text = f"{torch.get_num_threads()} at most; measured here: {count_of(measured, 'model')}"
    if not measured:
        return Finding("threads", text, NOTE, "hdtool bench-cost MODEL measures a model once, on an idle machine")
    return Finding("threads", text)


LOW_DISK_BYTES = 2 * 10**9
"""Free disk space, in bytes, below which a downloaded or quantized model may not fit."""


def folder_findings() -> Iterator[Finding]:
    """Yield findings on the folders that hdtool and its libraries write to, and on access to the hub."""
    yield _home()
    yield _compiled_code()
    yield from _hub()


def _home() -> Finding:
    finding = _writable("home", home(), "HDTOOL_HOME")
    parts = {folder.name: size_of(folder) for folder in home().glob("*/")}
    largest = sorted((part for part in parts.items() if part[1]), key=lambda part: -part[1])
    listed = ", ".join(f"{name} {abbreviated(size)}B" for name, size in largest)
    return replace(finding, found=f"{finding.found}; in it: {listed or 'nothing'}", bytes=sum(parts.values()))


def size_of(folder: Path, pattern: str = "*") -> int:
    """Return the total size in bytes of regular files that match ``pattern`` at any depth in a folder."""
    total = 0
    for path in folder.rglob(pattern):
        with suppress(OSError):
            status = path.lstat()
            total += status.st_size * S_ISREG(status.st_mode)
    return total


def store_findings() -> Iterator[Finding]:
    items = stored_items()
    for item in items:
        yield _store(item)
    if not items:
        advice = "hdtool build-model-db MODEL --from answers.jsonl"
        yield Finding("stores", "none: drafts come from the conversation and the history alone", NOTE, advice)


def _writable(name: str, folder: Path, variable: str) -> Finding:
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Finding(name, f"{folder} cannot be written", FIX, f"correct the permissions, or set {variable}")
    free = shutil.disk_usage(existing).free
    state, advice = (
        (NOTE, f"make room, or set {variable} to a folder on another disk") if free < LOW_DISK_BYTES else (OK, "")
    )
    return Finding(name, f"{folder}, {free / 1e9:.1f} GB free", state, advice)


def _compiled_code() -> Finding:
    """Report which parts of the program are not compiled yet, if any, and the folder and size of the compiled code."""
    folder = code_folder().parent
    size = size_of(folder)
    if missing := [NOUNS[part] for part in PARTS if not is_compiled(part)]:
        text = f"not yet: {' and '.join(missing)}; the first answer compiles them into {folder}"
        return Finding("compiled", text, NOTE, bytes=size)
    return Finding("compiled", f"{abbreviated(size)}B in {folder}", bytes=size)


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    models = sum(1 for _ in cache.glob("models--*"))
    finding = _writable("hub cache", cache, "HF_HOME")
    size = size_of(cache)
    yield replace(
        finding, found=f"{finding.found}; in it: {count_of(models, 'model')}, {abbreviated(size)}B", bytes=size
    )
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "HF_HUB_OFFLINE is set: nothing is downloaded", NOTE, "unset HF_HUB_OFFLINE to download")
    elif get_token() is None:
        yield Finding("hub", "no token: gated and private models cannot be downloaded", NOTE, "hf auth login")
    else:
        yield Finding("hub", "a token is there")


def _store(item: StoredItem) -> Finding:
    if item.fault:
        return Finding(item.name, item.fault, FIX, f"build it again, or hdtool stores remove {item.name}")
    tokens = f", {item.tokens:,} tokens" if item.tokens is not None else ""
    if item.kind == MODEL_KIND and not item.model:
        command = f"hdtool build-model-db MODEL --from {item.folder}"
        return Finding(item.name, f"names no model, so none finds it{tokens}", NOTE, command)
    whose = item.model.name if item.model else f"any model of the tokenizer {item.tokenizer}"
    return Finding(item.name, f"{whose}{tokens}")


BYTES_IN_FLOAT32 = 2.0
"""Ratio of float32 size to size on disk: most checkpoints are 16-bit, and CPUs compute in float32."""


def model_findings(config: ModelConfig) -> Iterator[Finding]:
    """Yield the findings about a model, stopping at the first error that prevents further checks."""
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
        yield Finding("model", str(error), FIX)


def _weights(config: ModelConfig, folder: Path) -> Iterator[Finding]:
    if file := gguf_file(config):
        slow = slow_weights(GGUFFile.open(file)) if pick_device("auto").type == "cpu" else None
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
    text = f"{size / 1e9:.2f} GB in {count_of(len(files), 'file')}"
    needed, available = size * BYTES_IN_FLOAT32, available_memory()
    if pick_device("auto").type == "cpu" and available and needed > available:
        advice = "take --dtype bfloat16, --quantization q8_0 or int8, or a smaller model"
        yield Finding("weights", f"{text}, {needed / 1e9:.1f} GB in float32: more than the memory", NOTE, advice)
    else:
        yield Finding("weights", text)


def _no_weights(config: ModelConfig) -> Finding:
    if config.model and Path(config.model).expanduser().is_dir():
        advice = "get the folder again, whole: model.safetensors, or all shards of its index"
        return Finding("weights", "missing or not whole", FIX, advice)
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
    if store := model_store_for(model, tokenizer):
        return Finding("model store", _described(store))
    advice = f"hdtool build-model-db {shlex.quote(config.name)} --from answers.jsonl"
    return Finding("model store", "none of this model" if model else "none, as the weights are not here", NOTE, advice)


def _described(folder: Path) -> str:
    return f"{folder}, {read_manifest(folder).counts['tokens']:,} tokens"


PROBE_PROMPT = "def read(path):"
PROBE_TOKENS = 10
PROBE_NODES = 8
"""Number of draft tokens per step; fixed, because a budget derived from measured passes could be zero."""


def decoding_findings() -> Iterator[Finding]:
    try:
        (plain, _), (drafted, steps) = decode_probe("ar"), decode_probe("hd")
    except Exception as error:  # mismatched libraries raise many kinds of errors
        advice = "install the versions of constraints.txt, and report this with the output of hdtool doctor --json"
        yield Finding("decoding", f"the embedded model cannot be used ({error_reason(error)})", FIX, advice)
        return
    if drafted != plain:
        advice = "report this with the output of hdtool doctor --json"
        yield Finding("decoding", "the embedded model gives another answer with drafts than without", FIX, advice)
        return
    yield Finding("decoding", f"the embedded model gives {len(plain)} tokens in {steps} steps, as without drafts")


def decode_probe(method: str) -> tuple[list[int], int]:
    """Answer a short prompt with the embedded model; return the token ids and the number of steps.

    Neither correctness proofs nor cost curves are saved.
    """
    decoding = DecodeConfig(method, draft_tokens=PROBE_NODES, max_new_tokens=PROBE_TOKENS)
    stores = StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
    answerer = Answerer(
        ModelConfig(dtype="float32", threads=torch.get_num_threads()), decoding, SamplingConfig(), stores=stores
    )
    for answer in answerer.all_answers([Prompt.from_text(PROBE_PROMPT)]):
        for _ in answer:
            pass
    return answer.output_ids, answer.stats.steps
