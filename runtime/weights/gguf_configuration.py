"""Writes a GGUF file's configuration, generation settings, tokenizer and chat template as save_pretrained does.

transformers reads them from small GGUF files that hold copies of what it needs: the library gguf, with which
transformers reads the configuration, takes seconds for a vocabulary, although only its size matters there.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from struct import pack, unpack_from
from tempfile import TemporaryDirectory
from typing import Any

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.data.gguf_header import ALIGNMENT, ARRAY_TYPE, GGUF_MAGIC, GGUF_VERSIONS, STRING_TYPE
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_settings import GPT_OSS, GPT_OSS_END_TOKENS, MISREAD, restore_settings

END_OF_TURN_SETTINGS = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
"""Settings with the tokens that end a turn or message; transformers reads only the token that ends a text."""
NOT_COPIED = (MISREAD, "general.alignment")
"""Prefixes of keys that are left out of the small files."""
COPY = "model.gguf"
FLOAT32 = 0
"""Type number of float32 in a GGUF file."""
VOCABULARY, TOKENS = "tokenizer.", "tokenizer.ggml.tokens"
"""Prefix of the keys of a tokenizer, and the key of its tokens."""


def _text(value: str) -> bytes:
    content = value.encode()
    return pack("<Q", len(content)) + content


def _strings(key: str, values: Sequence[str]) -> bytes:
    """Return the bytes of a key whose value is an array of strings."""
    array = pack("<IIQ", ARRAY_TYPE, STRING_TYPE, len(values))
    return _text(key) + array + b"".join(_text(value) for value in values)


FEW = ("a", "b")
STAND_IN = (
    _text("tokenizer.ggml.model") + pack("<I", STRING_TYPE) + _text("gpt2"),
    _strings(TOKENS, FEW),
    _strings("tokenizer.ggml.merges", ()),
)
"""Entries of a stand-in tokenizer with two tokens."""


def write_configuration(file: GGUFFile, folder: Path) -> None:
    """Write a GGUF file's configuration, generation settings, tokenizer and chat template to a folder.

    Raise a ``ModelError`` if transformers cannot read them.
    """
    from transformers import GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    entries = {name: entry for name, entry in file.entries().items() if not name.startswith(NOT_COPIED)}
    with _errors_worded(file, "configuration"):
        settings = _settings(file, entries, folder)
        settings.dtype = file.dtype
        settings.eos_token_id = _ends(file, settings.eos_token_id)
        if settings.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"a model of type {settings.model_type} does not generate text token by token")
        # Servers choose the model class by this name, which GGUF files lack.
        settings.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[settings.model_type]]
        restore_settings(settings, file)
        settings.save_pretrained(folder)
        generation = GenerationConfig.from_model_config(settings)
    with _errors_worded(file, "tokenizer"):
        tokenizer = _tokenizer(entries, folder)
        tokenizer.save_pretrained(folder)
        _shorten_reading(tokenizer, folder)
    if file.architecture == GPT_OSS:
        vocabulary = tokenizer.get_vocab()
        named = [vocabulary[token] for token in GPT_OSS_END_TOKENS if token in vocabulary]
        generation.eos_token_id = _ends(file, generation.eos_token_id, named)
    generation.save_pretrained(folder)


def _settings(file: GGUFFile, entries: dict[str, bytes], folder: Path) -> Any:
    """Return the configuration, which transformers reads from a copy with two tokens: reading all takes seconds."""
    from transformers import AutoConfig, PreTrainedConfig

    kept = [entry for name, entry in entries.items() if not (name.startswith(VOCABULARY) and _is_array(entry))]
    tokens, names = file.header.values.get(TOKENS), file.tensors
    with _copy(folder, kept + [_strings(TOKENS, FEW)] * (tokens is not None), names) as copy:
        stated, _ = PreTrainedConfig.get_config_dict(copy, gguf_file=COPY)
    if tokens is not None and stated.get("vocab_size") == len(FEW):
        stated["vocab_size"] = tokens
    return AutoConfig.for_model(**stated)


def _tokenizer(entries: dict[str, bytes], folder: Path) -> Any:
    """Return the tokenizer as AutoTokenizer reads it.

    AutoTokenizer chooses the class by the configuration, so a copy with two tokens shows which class this is.
    """
    from transformers import AutoTokenizer

    others = [entry for name, entry in entries.items() if not name.startswith(VOCABULARY)]
    with _copy(folder, [*others, *STAND_IN]) as copy:
        chosen: Any = type(AutoTokenizer.from_pretrained(copy, gguf_file=COPY, trust_remote_code=False))
    with _copy(folder, entries.values()) as copy:
        return chosen.from_pretrained(copy, gguf_file=COPY)


def _shorten_reading(tokenizer: Any, folder: Path) -> None:
    """Rewrite a saved tokenizer so that transformers reads it faster, and in less memory.

    The settings then list the added tokens, which transformers otherwise finds by parsing the whole vocabulary.
    """
    file = folder / "tokenizer_config.json"
    added = {str(token_id): token.__getstate__() for token_id, token in sorted(tokenizer.added_tokens_decoder.items())}
    settings = json.loads(file.read_text(encoding="utf-8")) | {"added_tokens_decoder": added}
    file.write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def _is_array(entry: bytes) -> bool:
    (length,) = unpack_from("<Q", entry)
    return unpack_from("<I", entry, 8 + length) == (ARRAY_TYPE,)


@contextmanager
def _copy(folder: Path, entries: Collection[bytes], names: Iterable[str] = ()) -> Iterator[Path]:
    """Write a GGUF file with these entries, and tensors of one number with these names; yield its temporary folder."""
    table = [_text(name) + pack("<IQIQ", 1, 1, FLOAT32, 0) for name in names]
    header = GGUF_MAGIC + pack("<IQQ", max(GGUF_VERSIONS), len(table), len(entries))
    with TemporaryDirectory(dir=folder) as scratch:
        (Path(scratch) / COPY).write_bytes(header + b"".join([*entries, *table]) + bytes(2 * ALIGNMENT))
        yield Path(scratch)


def _ends(file: GGUFFile, token_ids: int | list[int] | None, others: Sequence[int] = ()) -> int | list[int] | None:
    """Return the token ids that end an answer: ``token_ids``, ``others`` and the file's end-of-turn tokens."""
    ends = list(token_ids) if isinstance(token_ids, (list, tuple)) else [] if token_ids is None else [token_ids]
    ends += [token for name in END_OF_TURN_SETTINGS if (token := file.header.values.get(name)) is not None]
    ends = list(dict.fromkeys([*ends, *others]))
    return ends if len(ends) > 1 else ends[0] if ends else None


@contextmanager
def _errors_worded(file: GGUFFile, part: str) -> Iterator[None]:
    try:
        yield
    except (HdtoolError, OSError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()).split(". ")[0].rstrip(".")[:300] or type(error).__name__
        raise ModelError(
            f"transformers {metadata.version('transformers')} cannot read the {part} of {file.path}, which has "
            f"architecture {file.architecture} ({reason}): take the model in the layout of save_pretrained"
        ) from error
