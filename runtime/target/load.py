"""Loads a target model and its tokenizer from a folder, the Hugging Face hub or a GGUF file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from hdtool.data.errors import FamilyError, HdtoolError, ModelError, OptionError, command_for_missing, did_you_mean
from hdtool.data.notes import note
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.generation.generation_settings import generation_settings
from hdtool.runtime.kernels.compile_process import core_left_free
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.kernels.mixture_of_experts import compile_experts
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.compact_layers import compact_weights, expand_weights_read, pack_weights
from hdtool.runtime.model.devices import use_planless_attention
from hdtool.runtime.model.lean_imports import collect_garbage_again
from hdtool.runtime.model.quantization import (
    MXFP4,
    library_of,
    quantization,
    require_libraries,
)
from hdtool.runtime.model.refusals import refuse_by_configuration
from hdtool.runtime.model.transformers_internals import is_known_type, text_class
from hdtool.runtime.settings.model import BLOCKS, DEVICES, INT8, ModelConfig
from hdtool.runtime.target.int8_activations import NO_INT8, refuse_by_file, refuse_by_settings
from hdtool.runtime.target.proof_cache import KeptProof, Proof, logits_hash, proof_of
from hdtool.runtime.target.target import Target
from hdtool.runtime.target.tensor_parallel import LeadingTarget, ProcessGroup, check_device, check_sharding, leader
from hdtool.runtime.weights.checkpoint_identity import CONFIG_FILES, checkpoint_of, place_of
from hdtool.runtime.weights.fill_model import name_after
from hdtool.runtime.weights.gguf_file import existing_parts, gguf_file
from hdtool.runtime.weights.hub import weight_files
from hdtool.runtime.weights.stored_model import (
    attention_error,
    attention_options,
    files_of,
    source_for_transformers,
    stored_model,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hdtool.data.stores.tenant import Tenant
    from hdtool.runtime.settings.decoding import StoresConfig
    from hdtool.runtime.stores.store_opener import StoreOpener

T = TypeVar("T")

TOKENIZER_PREFIXES = ("tokenizer", "vocab", "spiece", "sentencepiece", "tiktoken", "tekken", "merges")
"""Prefixes of the names of tokenizer files."""
NO_BLOCKS = (
    "--quantization {scheme} is for one process on a CPU that converts float16: leave it out, or take int8 or nf4, "
    "which libraries compute with"
)


@dataclass(frozen=True)
class Loaded:
    """A loaded target with its tokenizer."""

    name: str
    target: Target
    tokenizer: PreTrainedTokenizerBase
    checkpoint: Checkpoint | None = None
    """Checkpoint that the model was loaded from, which identifies the model's stores; None if unknown."""

    def store_opener(self, config: StoresConfig | None = None, tenant: Tenant | None = None) -> StoreOpener:
        """Return an opener of the model's stores and history; ``config`` may name stores."""
        # Imported here, because loading a model needs neither stores nor the libraries that read them.
        from hdtool.runtime.model.model_fingerprint import fingerprint
        from hdtool.runtime.settings.decoding import StoresConfig
        from hdtool.runtime.stores.store_opener import StoreOpener

        weights = partial(fingerprint, self.target.model)
        return StoreOpener(self.name, self.tokenizer, self.checkpoint, config or StoresConfig(), tenant, weights)

    @property
    def stops(self) -> frozenset[int]:
        """Token ids that end an answer, from the model's generation settings or else its tokenizer."""
        return ends_of(self.target.model.generation_config.eos_token_id, self.tokenizer)


_TARGETS: WeakValueDictionary[int, Target] = WeakValueDictionary()
"""Targets that ``load`` returned and that are still in use, by the id of their model."""


def target_of_loaded(model: PreTrainedModel) -> Target | None:
    """Return a second target for a model that ``load`` has loaded; it computes as the first one does.

    Return None if ``load`` didn't load the model, if the first target is gone, or if ``Target.twin`` returns None.
    """
    loaded = _TARGETS.get(id(model))  # a target holds its model, so the id is not that of another one
    return loaded.twin() if loaded else None


@core_left_free()
def load(config: ModelConfig | str) -> Loaded:
    """Load the model and tokenizer that ``config`` names; if it names none, load the built-in demo model.

    If loading fails, raise an ``HdtoolError`` that says what to do.
    """
    config = ModelConfig(config) if isinstance(config, str) else config
    device = pick_device(config.device)
    if config.activations == INT8:
        if config.device_map or device.type != "cpu" or leader():
            raise OptionError(NO_INT8)
        refuse_by_file(config)
    settings = load_settings(config)
    refuse_by_configuration(settings)
    tokenizer = load_tokenizer(config)
    if config.quantization in BLOCKS and (device.type != "cpu" or leader() or not EXPANDS_FLOAT16):
        raise OptionError(NO_BLOCKS.format(scheme=config.quantization))
    target = _placed_target(config, settings, device)
    if target.processes == 1:
        target.notice_changes()  # records the model, so that later changes are seen
        _TARGETS[id(target.model)] = target
    return Loaded(config.name, target, tokenizer, checkpoint_of(config))


def _placed_target(config: ModelConfig, settings: Any, device: torch.device) -> Target:
    if group := leader():
        return _leading_target(config, settings, group)
    if config.device_map:
        placed = _weights(config, settings, device, device_map=config.device_map)
        return _attempt(config.name, f"with device map {config.device_map}", lambda: Target(placed))
    if device.type != "cpu":
        model = _on_one_device(config, settings, device)
        return _attempt(config.name, f"on {device}", lambda: Target(model))
    if config.activations == INT8:
        refuse_by_settings(config, settings)
    target = _cpu_target(config, settings)
    # Only now, because compiled passes are proved in float32.
    if config.activations == INT8 and not (target.compiled and target.compiled.use_int8_activations()):
        raise OptionError(NO_INT8)
    return target


def _cpu_target(config: ModelConfig, settings: Any) -> Target:
    """Load a model whose passes are compiled if possible; a kept proof replaces the comparison with Transformers.

    If the model or its results differ from the proof, forget the proof and load the model again.
    """
    kept = _kept_proof(config, settings)
    proof = kept.read() if kept else None
    try:
        target = _target_with(proof, config, settings, kept)
    except (HdtoolError, torch.OutOfMemoryError):
        raise
    except Exception:  # such as a version of transformers that builds models differently
        if proof is None:
            raise
        target = None
    if target is None and kept:
        kept.forget()
        target = _target_with(None, config, settings, kept)
    assert target
    return target


def _quantized(config: ModelConfig, settings: Any) -> Path | None:
    """Return the folder with a checkpoint's weights quantized to blocks, or None if the options don't ask for them.

    Quantize the checkpoint first if needed. Raise an ``HdtoolError`` if this is not possible.
    """
    name, scheme = config.name, config.quantization
    if scheme not in BLOCKS:
        return None
    if saved := library_of(settings):
        raise OptionError(f"{name} is quantized already, with {saved}: leave out --quantization {scheme}")
    if config.trust_remote_code and getattr(settings, "auto_map", None):
        raise OptionError(f"--quantization {scheme} takes no model with code of its own, as {name} is: leave it out")

    def loaded() -> Any:
        stored = replace(config, quantization=None, dtype="auto")
        return stored_model(stored, settings, None, check=True) or _on_one_device(stored, settings, torch.device("cpu"))

    if file := gguf_file(config):
        files = list(existing_parts(file))
    else:
        place = place_of(config, CONFIG_FILES, weights=True)
        files = [place / CONFIG_FILES[0], *(weight_files(place) or ())]
    if not (checkpoint := checkpoint_of(config)):
        raise ModelError(f"{name} has no weights, or not all of them: get the checkpoint again, whole")
    from hdtool.runtime.weights.quantized_checkpoints import quantized_folder

    return quantized_folder(name, scheme, files, checkpoint.fingerprint, loaded)


def _target_with(proof: Proof | None, config: ModelConfig, settings: Any, kept: KeptProof | None) -> Target | None:
    """Load a model, compiled if possible, and keep a new proof, or return None if the model differs from ``proof``."""
    cpu = torch.device("cpu")
    quantized = _quantized(config, settings)
    model = _attempt(config.name, "its weights", lambda: stored_model(config, settings, quantized, check=proof is None))
    is_stored = model is not None
    if model is None:
        model = _on_one_device(config, settings, cpu)
    _set_generation(model, config)
    compact = dict(proof.compact) if proof else {}
    is_plain = not config.quantization and library_of(settings) in ("", MXFP4)
    if is_stored or (config.dtype == "auto" and (is_plain or pack_weights(model))):
        compact_weights(model, compact)
    compile_linear_layers(model)
    compile_experts(model)
    target = _attempt(config.name, f"on {cpu}", lambda: Target(model, facts=proof.facts if proof else None))
    if proof is None:
        expand_weights_read(model)
    if config.fused_layers and not config.attn_implementation:
        target.compile(proved=proof is not None)
    if proof:
        return target if target.compiled and logits_hash(target) == proof.logits else None
    if kept and (found := proof_of(target, compact)):
        kept.keep(found)
    return target


def _kept_proof(config: ModelConfig, settings: Any) -> KeptProof | None:
    """Return the record that keeps a compiled model's ``Proof`` between starts; None if no proof could be reused."""
    by_library = library_of(settings) or (config.quantization and config.quantization not in BLOCKS)
    fixed = config.dtype != "auto" or by_library or config.trust_remote_code
    if fixed or not config.fused_layers or config.attn_implementation:
        return None
    try:
        family = cast(type, MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)])
        return KeptProof(config, settings, family, files_of(config))
    except (HdtoolError, KeyError, OSError):  # loading the model raises an error that names the fault
        return None


def load_part(config: ModelConfig) -> Target:
    """Load this process's shard of a model; all processes must load at the same time."""
    return _attempt(config.name, "a part of it", lambda: Target(_sharded_weights(config, load_settings(config)), never))


def _leading_target(config: ModelConfig, settings: Any, group: ProcessGroup) -> Target:
    name = config.name
    if config.quantization:
        raise OptionError("--quantization works in one process only, and torchrun started several: leave it out")
    if config.device_map:
        raise OptionError("device-map is for one process, and torchrun started several: leave it out")
    check_device(config.device)
    check_sharding(settings, name, group.size)
    group.broadcast("load", config)
    return _attempt(name, "a part of it", lambda: LeadingTarget(_sharded_weights(config, settings), group))


def _sharded_weights(config: ModelConfig, settings: Any) -> Any:
    from transformers.distributed.configuration_utils import DistributedConfig

    parts = DistributedConfig(tp_size=torch.distributed.get_world_size())
    return _weights(config, settings, pick_device("auto"), distributed_config=parts)


def load_stock(config: ModelConfig) -> PreTrainedModel:
    """Load the unmodified model for comparisons; weights that ``load`` quantizes to blocks are expanded to float32."""
    settings = load_settings(config)
    model: PreTrainedModel = _on_one_device(config, settings, pick_device(config.device))
    model.eval()
    return model


def _on_one_device(config: ModelConfig, settings: Any, device: torch.device) -> Any:
    if (config.quantization and config.quantization not in BLOCKS) or library_of(settings):
        # Loaded directly onto the device, because quantization libraries pack weights for a specific device.
        return _weights(config, settings, device, device_map={"": str(device)})
    model = _weights(config, settings, device)
    return _attempt(config.name, f"on {device}", lambda: model.to(device))


def load_tokenizer(config: ModelConfig, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer without the model; raise an ``HdtoolError`` if that fails."""
    collect_garbage_again()  # the largest imports are done
    place = place_of(config, revision=revision)
    try:
        tokenizer: PreTrainedTokenizerBase = _attempt(
            config.name,
            "its tokenizer",
            lambda: AutoTokenizer.from_pretrained(place, trust_remote_code=config.trust_remote_code),
        )
    except ModelError as error:
        if any(name.startswith(TOKENIZER_PREFIXES) for name in os.listdir(place)):
            raise
        raise ModelError(
            f"{config.name} has no tokenizer: copy the files of its base model's tokenizer, such as tokenizer.json and "
            f"tokenizer_config.json, into {place}"
        ) from error
    return tokenizer


def load_stops(config: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that end a model's answers, from its configuration files or else the tokenizer."""
    place = place_of(config)
    ends = None
    for kind in (AutoConfig, GenerationConfig):  # the second takes precedence
        with suppress(OSError, ValueError):
            settings = kind.from_pretrained(place, trust_remote_code=config.trust_remote_code)
            configured = getattr(settings, "eos_token_id", None)
            ends = ends if configured is None else configured
    return ends_of(ends, tokenizer)


def ends_of(ends: int | Sequence[int] | None, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the token ids that end an answer: those in ``ends`` or, if it is None, the tokenizer's."""
    if ends is None:
        ends = tokenizer.eos_token_id
    return frozenset([ends] if isinstance(ends, int) else ends or ())


def load_settings(config: ModelConfig) -> Any:
    """Load a model's configuration without the model; raise an ``HdtoolError`` if that fails."""
    place, trust = place_of(config, CONFIG_FILES), config.trust_remote_code

    def read() -> Any:
        try:
            return AutoConfig.from_pretrained(place, trust_remote_code=trust)
        except (ValueError, KeyError) as error:
            stated, _ = PreTrainedConfig.get_config_dict(place)
            kind = stated.get("model_type")
            if kind is None or is_known_type(kind) or stated.get("auto_map"):
                raise
            raise FamilyError(
                f"{config.name} is of type {kind!r}, which transformers {transformers.__version__} does not know: "
                "pip install --upgrade transformers"
            ) from error

    return _attempt(config.name, "its configuration", read)


def _weights(config: ModelConfig, settings: Any, device: torch.device, **placement: Any) -> Any:
    """Load a model with transformers; raise an ``HdtoolError`` if that fails."""
    use_planless_attention(device)
    name, dtype = config.name, pick_dtype(config.dtype, device)
    options = {**placement, "dtype": dtype, "trust_remote_code": config.trust_remote_code, **attention_options(config)}
    scheme = None if config.quantization in BLOCKS else config.quantization
    quantized = bool(scheme or library_of(settings))
    if quantized:
        require_libraries(name, settings, scheme)
    if scheme:
        computed = dtype if isinstance(dtype, torch.dtype) else settings.dtype or torch.float32
        options["quantization_config"] = _attempt(name, "quantized", lambda: quantization(scheme, computed))
    loader = text_class(settings, trust_remote_code=config.trust_remote_code)
    if loader is None:
        raise FamilyError(
            f"models of type {settings.model_type!r} cannot be used: "
            f"transformers {transformers.__version__} has no class that generates text with them"
        )
    model = _attempt(name, "its weights", lambda: _complete_model(loader, config, settings, options))
    _set_generation(model, config)
    if quantized and config.dtype != "auto" and model.dtype != dtype:
        computed_in = str(model.dtype).removeprefix("torch.")
        note(f"{name} is quantized and computes in {computed_in}: --dtype has no effect")
    return model


def _set_generation(model: Any, config: ModelConfig) -> None:
    if config.generation_config:
        model.generation_config = generation_settings(config.generation_config, model.generation_config)


def _complete_model(loader: Any, config: ModelConfig, settings: Any, options: dict[str, Any]) -> Any:
    """Load a model; raise a ``ModelError`` if the checkpoint lacks weights, which would be initialized at random."""
    with source_for_transformers(config, settings, _quantized(config, settings)) as source:
        if source.is_read_on_request:
            loader = loader._model_mapping[type(settings)]
            del options["trust_remote_code"]
        try:
            model, report = loader.from_pretrained(**{**source.arguments, **options, "output_loading_info": True})
        except ValueError as error:
            raise attention_error(error, config) from error
    if lacking := sorted(report["missing_keys"]):
        raise ModelError(
            f"{config.name} lacks {len(lacking)} of its weights ({lacking[0]}, …): get the checkpoint again, whole"
        )
    if source.folder:
        name_after(model, source.folder)
    return model


def pick_device(wanted: str) -> torch.device:
    if wanted == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError:
        meant = did_you_mean(wanted, DEVICES)
        raise OptionError(f"device is {wanted!r}{meant}: expected auto, cpu, cuda, cuda:N or mps") from None
    available = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if (device.index or 0) >= available.get(device.type, 0):
        raise OptionError(f"device {wanted!r} is not there: torch {torch.__version__} sees {_listed(available)}")
    return device


def _listed(available: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in available.items() if count)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype | str:
    """Return the dtype to compute in; "auto" becomes float32 on a CPU and stays "auto" (the checkpoint's) elsewhere."""
    if wanted == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    dtype = getattr(torch, wanted)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _attempt(name: str, part: str, action: Callable[[], T]) -> T:
    """Run a loading step; convert errors of the libraries to a one-line ``ModelError``."""
    try:
        return action()
    except HdtoolError:
        raise
    except torch.OutOfMemoryError:
        raise ModelError(f"{name} does not fit into the memory of its device: take a smaller model or dtype") from None
    except Exception as error:
        raise ModelError(f"{name} cannot be loaded ({part}): {_reason(error, name)}") from error


def _reason(error: Exception, name: str) -> str:
    """Return the first sentence of a library's error, with advice, or the likely cause if the model isn't found."""
    text = " ".join(str(error).split())
    if "huggingface.co" in text and not Path(name).exists():
        return "there is no such folder here, and the hub has no such model or cannot be reached: check the name"
    first = text.split(". ")[0][:300] or type(error).__name__
    path = Path(name).expanduser()
    if isinstance(error, ImportError):
        return f"{first}: {command}" if (command := command_for_missing(error.name)) else first
    if path.is_dir():
        return f"{first}: check that the folder is whole"
    return f"{first}: check the file" if path.exists() else first
