"""Exports model folders that make ``generate`` draft with hdtool, and documents of stores as a corpus for SGLang.

SGLang tokenizes the corpus's strings when it starts, which may not give the original tokens, so an export counts the
tokens that change. Tokens change where a document was cut inside a character, where the model chose other tokens than
the tokenizer would for the text, and where the tokenizer starts every text with a space.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hdtool.builders.stores.edit_store import HistoryDocuments, StoreContents
from hdtool.builders.stores.frequent_sequences import TOKENIZER_BATCH, encode_texts
from hdtool.data.documents import Document, Tokens
from hdtool.data.errors import ModelError, OptionError, StoreError, os_errors_as
from hdtool.data.output_files import OutputFile
from hdtool.data.progress import ProgressBar, progress_bar
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_file_names import holds_history
from hdtool.data.stores.stores_at_home import history_at_home
from hdtool.runtime.settings.decoding import HOME, MEMORY, NO_HISTORY, DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.store_opener import StoreOpener
from hdtool.runtime.target.load import load_tokenizer
from hdtool.runtime.weights.checkpoint_identity import CONFIG_FILES, checkpoint_of, place_of
from hdtool.runtime.weights.gguf_file import gguf_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_FOLDER = "custom_generate"
CODE_FILE, REQUIREMENTS_FILE = f"{CODE_FOLDER}/generate.py", f"{CODE_FOLDER}/requirements.txt"
REQUIREMENTS = "hdtool\n"
FIRST_LINE = '"""Written by ``hdtool export``: answers of this model are drafted by hdtool."""'
MODEL_LINE = "MODEL = "
"""Start of the line that records the model folder whose files an export links to."""
CODE_TEMPLATE = """{first_line}

from typing import Any

MODEL = {model}
DECODING = {decoding}
STORES = {stores}


def generate(*arguments: Any, model: Any, **options: Any) -> Any:
    from hdtool.runtime.integrations.exported import generate as drafted

    return drafted(model, DECODING, STORES, *arguments, **options)
"""


def export(model: ModelConfig, out: Path, decoding: DecodeConfig, stores: StoresConfig) -> list[Path]:
    """Write a model folder that drafts with hdtool, or raise HdtoolError; return the model files that it links to."""
    code = OutputFile(out / CODE_FILE, "a file of hdtool export", _is_ours, ModelError)
    requirements = OutputFile(out / REQUIREMENTS_FILE, "a file of hdtool export", _is_our_list, ModelError)
    _check_destination(out)
    code.check()
    requirements.check()
    if gguf_file(model):
        raise ModelError(f"{model.name} is a GGUF file, and an export links to a folder of save_pretrained: name one")
    source = place_of(model, CONFIG_FILES, weights=True).resolve()
    if out.resolve() == source or source in out.resolve().parents:
        raise ModelError(f"{out} lies in the folder of the model: choose another place")
    files = list(_files(source))
    for name in (CODE_FILE, REQUIREMENTS_FILE):
        if source / name in files:
            raise ModelError(f"{source} has a {name} of its own, which an export would replace: export another model")
    _check_drafting(source, decoding, stores)
    text = CODE_TEMPLATE.format(
        first_line=FIRST_LINE,
        model=repr(str(source)),
        decoding=_changed_settings_code(decoding),
        stores=_stores_code(stores),
    )
    links = {out / file.relative_to(source): file for file in files}
    with os_errors_as(ModelError, f"{out} cannot be written", "correct the permissions, or choose another place"):
        # The old code names the model of these links, so they must be removed before the code is replaced.
        for path in _former_links(out):
            if path not in links or not _is_link_to(path, links[path]):
                path.unlink()
        # Write the code first, so that a later export recognizes and completes the folder of a killed export.
        code.write(text)
        for path, file in links.items():
            _link(file, path)
    requirements.write(REQUIREMENTS)
    return files


def _check_drafting(source: Path, decoding: DecodeConfig, stores: StoresConfig) -> None:
    """Raise an HdtoolError if the model has no tokenizer, or if a named store does not fit the tokenizer."""
    tokenizer = load_tokenizer(ModelConfig(str(source)))
    StoreOpener(str(source), tokenizer, None, stores).check_named(decoding.databases)


def _check_destination(out: Path) -> None:
    """Raise a ``ModelError`` if ``out`` exists and is neither an empty folder nor the folder of an earlier export."""
    if out.is_dir():
        if any(out.iterdir()) and not (out / CODE_FILE).is_file():
            raise ModelError(f"{out} holds other files: choose an empty or a new folder")
    elif os.path.lexists(out):
        raise ModelError(f"{out} is not a folder: choose another place")


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline().rstrip("\n") == FIRST_LINE


def _is_our_list(path: Path) -> bool:
    return path.read_bytes() == REQUIREMENTS.encode()


def _former_links(out: Path) -> set[Path]:
    """Return the links in a folder to the model that an earlier export recorded in its code."""
    source = _recorded_model(out / CODE_FILE)
    if source is None or source.resolve() == out.resolve():  # if code was copied into the model's folder
        return set()
    return {path for path in _files(out) if _is_link_to(path, source / path.relative_to(out))}


def _recorded_model(code: Path) -> Path | None:
    """Return the model folder that an export recorded in its code, or None if it recorded none."""
    if not code.is_file():
        return None
    lines = code.read_text(encoding="utf-8", errors="replace").splitlines()
    recorded = next((line.removeprefix(MODEL_LINE) for line in lines if line.startswith(MODEL_LINE)), "None")
    try:
        return Path(ast.literal_eval(recorded))
    except (SyntaxError, TypeError, ValueError):
        return None


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _link(file: Path, to: Path) -> None:
    """Make ``to`` a link to ``file``, symbolic if possible, else hard; raise a ModelError if ``to`` is another file."""
    target = file.resolve()
    if os.path.lexists(to):
        if _is_link_to(to, target):
            return
        if not to.is_symlink():
            raise ModelError(f"{to} is another file: choose an empty or a new folder")
        to.unlink()
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        to.symlink_to(target)
    except OSError:
        os.link(target, to)


def _is_link_to(path: Path, file: Path) -> bool:
    """Return True if ``path`` is a symbolic or hard link to ``file``. A symbolic link's target may be missing."""
    if path.exists() and file.exists():
        return path.samefile(file)
    return os.path.realpath(path) == os.path.realpath(file)


def _changed_settings_code(settings: DecodeConfig) -> str:
    """Return the settings that differ from the defaults, as Python code."""
    defaults = {field.name: field.default for field in fields(settings)}
    return repr({name: value for name, value in asdict(settings).items() if value != defaults[name]})


def _stores_code(stores: StoresConfig) -> str:
    """Return the stores as Python code, with absolute folders so that the working directory does not matter."""
    arguments: dict[str, str] = {}
    for name, value in asdict(stores).items():
        if value is not None:
            path = Path(value).expanduser()
            arguments[name] = str(path.resolve()) if path.exists() else value
    return repr(arguments)


SEPARATOR = 1
"""Number of tokens that SGLang inserts between documents and counts against its limit."""
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character to which tokenizers decode incomplete UTF-8 sequences."""


class ExportedDocument(NamedTuple):
    """Document as SGLang will tokenize it."""

    text: str
    tokens: int
    lost_tokens: int
    """Number of the document's tokens that tokenizing ``text`` does not reproduce."""


@dataclass
class ExportedCorpus:
    """Number of documents and tokens that were exported, changed or left out."""

    stores: list[Path]
    documents: int = 0
    tokens: int = 0
    """Number of tokens as SGLang counts them, separators included."""
    changed_documents: int = 0
    """Number of documents that lost tokens."""
    lost_tokens: int = 0
    empty_documents: int = 0
    """Number of documents left out because no text remained."""

    def count(self, written: ExportedDocument) -> None:
        if written.lost_tokens:
            self.changed_documents += 1
            self.lost_tokens += written.lost_tokens
        if not written.tokens:
            self.empty_documents += 1
            return
        self.tokens += written.tokens + SEPARATOR * (self.documents > 0)
        self.documents += 1


def export_corpus(model: ModelConfig, out: Path, stores: StoresConfig, history: str = MEMORY) -> ExportedCorpus:
    """Write the documents of a history and of the named or fitting stores to a new file; return what was written."""
    file = OutputFile(out, "an empty file", lambda path: False, StoreError)
    file.check()
    tokenizer = load_tokenizer(model)
    folders, documents, size = _documents(tokenizer, checkpoint_of(model), stores, history)
    exported = ExportedCorpus(folders)
    with file.replaced() as stream, progress_bar(size, "export", unit="tokens") as progress:
        for written in _texts(documents, tokenizer, progress):
            exported.count(written)
            if written.tokens:
                stream.write((json.dumps(written.text, ensure_ascii=False) + "\n").encode())
        if not exported.documents:
            raise StoreError(f"no text is in {_listed(folders)}: name a store with documents")
    return exported


def _documents(
    tokenizer: PreTrainedTokenizerBase, model: Checkpoint | None, stores: StoresConfig, history: str
) -> tuple[list[Path], Iterator[Document], int]:
    """Return ``(folders, documents, number of tokens)`` of the stores to export; raise StoreError if there are none."""
    found = StoreOpener("", tokenizer, model, stores).open()
    fingerprint = found.tokenizer or TokenizerFingerprint.of(tokenizer)
    contents = [StoreContents.of(store.folder) for store in found.opened.values()]
    kept = _history_folder(history, fingerprint, model)
    answers = HistoryDocuments([kept] if kept else [], fingerprint)
    folders = [*([kept] if kept else []), *(one.folder for one in contents)]
    if not folders:
        raise StoreError(
            "no store of this model is in hdtool's home: build one with hdtool build-model-db or build-corpus-db, or "
            "name one with --model-db, --corpus-db or --history"
        )

    def documents() -> Iterator[Document]:
        yield from answers
        for one in contents:
            yield from one.documents()

    return folders, documents(), answers.tokens + sum(one.manifest.counts["tokens"] for one in contents)


def _history_folder(history: str, tokenizer: TokenizerFingerprint, model: Checkpoint | None) -> Path | None:
    """Return the folder of the history store that ``--history`` selects, which must exist; None if it selects none."""
    if history in (MEMORY, NO_HISTORY):
        return None
    if history != HOME:
        folder = Path(history).expanduser()
    elif model:
        folder = history_at_home(model.fingerprint, tokenizer)
    else:
        raise OptionError("--history home needs the model's weights on this machine: name the history's folder instead")
    if not holds_history(folder):
        raise StoreError(f"{folder} holds no history store: name another folder with --history, or leave it out")
    return folder


def _texts(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerBase, progress: ProgressBar
) -> Iterator[ExportedDocument]:
    remaining, done = iter(documents), 0
    while batch := [document.ids for document in islice(remaining, TOKENIZER_BATCH)]:
        texts = [text_of(tokenizer, ids) for ids in batch]
        for ids, text, back in zip(batch, texts, encode_texts(texts, tokenizer), strict=True):
            yield ExportedDocument(text, len(back), len(ids) - count_preserved_tokens(ids, back))
            done += len(ids)
        progress.to(done)


def text_of(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int] | Tokens) -> str:
    """Decode a document, keeping special tokens but stripping incomplete characters at both ends."""
    text = tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text).strip(REPLACEMENT)


def count_preserved_tokens(ids: Sequence[int] | Tokens, back: Sequence[int] | Tokens) -> int:
    """Return the combined length of two sequences' common prefix and suffix, at most the length of the shorter one."""
    one, other = np.asarray(ids, np.int64), np.asarray(back, np.int64)
    shorter = min(len(one), len(other))
    start = _leading_true_count(one[:shorter] == other[:shorter])
    end = _leading_true_count((one[len(one) - shorter :] == other[len(other) - shorter :])[::-1])
    return min(shorter, start + end)


def _leading_true_count(equal: Tokens) -> int:
    """Return the number of leading True values."""
    different = np.flatnonzero(~equal)
    return int(different[0]) if len(different) else len(equal)


def _listed(folders: Sequence[Path]) -> str:
    return " and ".join(os.fspath(folder) for folder in folders)
