"""Builds a configuration's model from its stored weights: read by name from safetensors, GGUF or quantized files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr
from importlib import metadata
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from transformers import GgufConfig

from hdtool.data.artifact import MANIFEST
from hdtool.data.errors import OptionError
from hdtool.data.memory import available_memory
from hdtool.data.notes import note
from hdtool.data.progress import progress_bar
from hdtool.runtime.model.quantization import MXFP4, library_of
from hdtool.runtime.model.transformers_internals import empty_model, text_class
from hdtool.runtime.settings.model import INT8, ModelConfig
from hdtool.runtime.weights.checkpoint_identity import CONFIG_FILES, place_of
from hdtool.runtime.weights.damaged_weights import WeightCheck
from hdtool.runtime.weights.fill_model import fill, fits, on_request
from hdtool.runtime.weights.gguf_file import GGUFFile, existing_parts, gguf_file
from hdtool.runtime.weights.safetensors_files import safetensors_store
from hdtool.runtime.weights.weight_store import WeightStore


def files_of(config: ModelConfig) -> list[Path]:
    """Return all files that a model depends on: those of its folder, and its GGUF files."""
    file = gguf_file(config)
    folder = place_of(config, CONFIG_FILES, weights=True)
    kept = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    return [*kept, *(existing_parts(file) if file else ())]


def stored_model(config: ModelConfig, settings: Any, quantized: Path | None, *, check: bool) -> Any:
    """Return a float32 CPU model with its weights as they are stored, or None if transformers must load them.

    ``quantized`` is the folder with the model's weights in quantized blocks, if hdtool quantized them. With ``check``,
    damaged weights are refused, and the row order of GGUF tensors is compared with transformers' own result.
    """
    by_library = config.quantization and not quantized
    if (config.dtype != "auto" and not quantized) or by_library or library_of(settings) not in ("", MXFP4):
        return None
    brings_code = config.trust_remote_code and getattr(settings, "auto_map", None)
    if brings_code or text_class(settings, trust_remote_code=False) is None:
        return None
    model = _empty(config, settings)
    store = _store(config, settings, quantized, model, check=check, stays_packed=True)
    if store is None or not fits(store, model):
        return None
    available = available_memory()
    is_larger = available is not None and store.bytes > available
    store.maps_blocks = is_larger or config.activations == INT8  # int8 matmuls copy blocks into panels
    if is_larger:
        note(
            f"{config.name} has {store.bytes:,} bytes of weights, and {available:,} bytes of memory are free: "
            "its blocks stay in the mapped file, which must not be changed meanwhile"
        )
    with progress_bar(store.bytes, f"reading {config.name}", unit="B", is_left=False) as bar:
        fill(model, store, _folder(config, quantized), bar, WeightCheck(config.name) if check else None)
    return model


def _folder(config: ModelConfig, quantized: Path | None) -> Path:
    return quantized or place_of(config, CONFIG_FILES, weights=True)


def _store(
    config: ModelConfig, settings: Any, quantized: Path | None, model: Any, *, check: bool, stays_packed: bool = False
) -> WeightStore | None:
    """Return the weights of an empty model; None if they can't be read by name.

    With ``stays_packed``, print a note if some weights of a GGUF file cannot stay in their blocks.
    """
    if quantized:
        from hdtool.runtime.weights.quantized_checkpoints import quantized_store

        return quantized_store(quantized)
    if (path := gguf_file(config)) is None:
        return safetensors_store(_folder(config, None), settings, model)
    from hdtool.runtime.weights.gguf_formats import slow_weights
    from hdtool.runtime.weights.gguf_names import gguf_store

    file = GGUFFile.open(path)
    if stays_packed and (slow := slow_weights(file)):
        note(f"{config.name}: {slow}")
    return gguf_store(file, settings, model, check=check)


def _empty(config: ModelConfig, settings: Any) -> Any:
    try:
        return empty_model(settings, **attention_options(config))
    except ValueError as error:
        raise attention_error(error, config) from error


def attention_options(config: ModelConfig) -> dict[str, Any]:
    return {"attn_implementation": config.attn_implementation} if config.attn_implementation else {}


def attention_error(error: ValueError, config: ModelConfig) -> Exception:
    """Return an ``OptionError`` if transformers refuses the chosen attention implementation, else the error itself."""
    if not config.attn_implementation or "does not support an attention implementation" not in str(error):
        return error
    return OptionError(f"{config.name} has no attention {config.attn_implementation}: leave out --attn-implementation")


class WeightSource(NamedTuple):
    """Where transformers' loader finds a model's weights."""

    arguments: dict[str, Any]
    """Arguments of ``from_pretrained``."""
    folder: Path | None = None
    """Folder with the configuration, if it is not among the arguments."""

    @property
    def is_read_on_request(self) -> bool:
        return "state_dict" in self.arguments


@contextmanager
def source_for_transformers(config: ModelConfig, settings: Any, quantized: Path | None) -> Iterator[WeightSource]:
    """Yield where transformers' loader finds a model's weights; ``quantized`` is as for ``stored_model``."""
    folder, file = _folder(config, quantized), gguf_file(config)
    if file is None and quantized is None:
        yield WeightSource({"pretrained_model_name_or_path": folder})
        return
    model = empty_model(settings)
    store = _store(config, settings, quantized, model, check=True)
    if store and (quantized or file is None or fits(store, model)):
        arguments = {"pretrained_model_name_or_path": None, "config": settings, "state_dict": on_request(store)}
        yield WeightSource(arguments, folder)
        return
    assert file
    note(
        f"{file}: transformers {metadata.version('transformers')} reads its weights, which takes longer, and "
        "expands them"
    )
    with TemporaryDirectory() as place, _bars_on_terminals():
        (Path(place) / file.name).symlink_to(file.resolve())  # alone, as transformers also reads neighboring files
        yield WeightSource(
            {
                "pretrained_model_name_or_path": place,
                "gguf_file": file.name,
                "config": settings,
                "quantization_config": GgufConfig(dequantize=True),
            },
            folder,
        )


def _bars_on_terminals() -> AbstractContextManager[Any]:
    """Return a context manager that hides transformers' bar, which no setting hides, if stderr isn't a terminal."""
    is_terminal = sys.stderr is not None and sys.stderr.isatty()
    return nullcontext() if is_terminal else redirect_stderr(StringIO())
