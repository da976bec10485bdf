"""Quantizes each checkpoint once to Q8_0 or Q4_0 blocks, which are kept in hdtool's home.

Only linear layers, experts and embeddings are quantized, not the routers that choose experts. Embeddings and the output
layer use Q8_0 with either scheme, because their error reaches every logit.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hdtool.data.durable_files import file_lock, folder_lock, lock_path, remove_scratch_folders, scratch_folder
from hdtool.data.errors import ModelError, os_errors_as
from hdtool.data.output_files import OutputFile, is_json_with, json_object, sync_to_disk
from hdtool.data.stores.home import quantized_at_home, quantized_models_at_home
from hdtool.runtime.kernels.compact_weight import CompactWeight, expand_compact, narrowed
from hdtool.runtime.kernels.experts import WEIGHTS, arrange_experts, matrices_of
from hdtool.runtime.kernels.gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.matrix_formats import BlockFormat
from hdtool.runtime.kernels.packed_matrix import (
    FORMATS_BY_NAME,
    Q4_0,
    Q8_0,
    PackedExperts,
    PackedMatrix,
    quantize_matrix,
)
from hdtool.runtime.model.compact_layers import ParameterRef, is_of_linear_layers, weight_parameters
from hdtool.runtime.model.damaged_weights import WeightCheck
from hdtool.runtime.model.gguf.converted_folder import (
    GGUF_SUFFIX,
    REST,
    Signature,
    content_hash,
    is_file_name,
    remove_files,
)
from hdtool.runtime.model.hub import fingerprint_of

MANIFEST = "quantized.json"
FORMAT = 2
KEYS = ("scheme", "sha256", "fingerprint", "transformers", "files", "kinds", "transposed", "seen")
MAX_SEEN = 16
Sources = tuple[Signature, ...]
"""Signatures of a checkpoint's files."""


class KeptFile(NamedTuple):
    """SHA-256 and ``stat`` fields of a quantized model's file; if the fields have changed, the file is hashed again."""

    sha256: str
    bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, sha256: str) -> KeptFile:
        status = path.stat()
        return cls(sha256, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def is_at(self, path: Path) -> bool:
        status = path.stat()
        if KeptFile.of(path, self.sha256) == self:
            return True
        return status.st_size == self.bytes and content_hash(path) == self.sha256


@dataclass(frozen=True)
class QuantizedManifest:
    scheme: str
    sha256: str
    """SHA-256 over the hashes of the checkpoint's files."""
    fingerprint: str
    """Fingerprint of the checkpoint, which identifies the model's stores."""
    transformers: str
    """Version of transformers that read the checkpoint."""
    files: dict[str, KeptFile]
    kinds: dict[str, str]
    """Block format of each quantized weight, by name."""
    transposed: list[str]
    """Names of experts ``[experts, columns, rows]``; others are ``[experts, rows, columns]``, as all blocks are."""
    seen: tuple[Sources, ...] = ()
    """Signatures of source files known to have the checkpoint's content, one group per copy of the checkpoint."""
    format: int = FORMAT

    @classmethod
    def read(cls, folder: Path) -> QuantizedManifest | None:
        """Return the manifest stored in a folder.

        Return None if it is missing, damaged or in another format, or if a file that it lists is outside the folder.
        """
        try:
            row = json_object(folder / MANIFEST)
            seen = tuple(tuple(Signature(**fields) for fields in sources) for sources in row.pop("seen"))
            files = {name: KeptFile(*entry) for name, entry in row.pop("files").items()}
            manifest = cls(**row, files=files, seen=seen)
        except (OSError, KeyError, TypeError, ValueError):
            return None
        return manifest if manifest.format == FORMAT and all(map(is_file_name, files)) else None

    def is_of(self, scheme: str) -> bool:
        return self.scheme == scheme and self.transformers == metadata.version("transformers")

    def is_whole(self, folder: Path) -> bool:
        """Return True if all files exist with their recorded content."""
        try:
            return all(file.is_at(folder / name) for name, file in self.files.items())
        except OSError:
            return False

    def seen_as(self, sources: Sources) -> QuantizedManifest:
        paths = [source.path for source in sources]
        others = [group for group in self.seen if [source.path for source in group] != paths]
        return replace(self, seen=(*others, sources)[-MAX_SEEN:])

    def in_folder(self, folder: Path) -> QuantizedManifest:
        """Return a copy of the manifest that records the current ``stat`` fields of the files in ``folder``."""
        return replace(self, files={name: KeptFile.of(folder / name, file.sha256) for name, file in self.files.items()})

    def write(self, folder: Path) -> None:
        ours = is_json_with(KEYS, FORMAT)
        file = OutputFile(folder / MANIFEST, "the manifest of a quantized model", ours, ModelError, "move it away")
        file.write(json.dumps(asdict(self), indent=1) + "\n")


def quantized_manifests() -> Iterator[tuple[Path, QuantizedManifest]]:
    """Yield the folder and the manifest of each quantized model in hdtool's home."""
    for place in quantized_models_at_home().glob(f"[!.]*/{MANIFEST}"):
        if manifest := QuantizedManifest.read(place.parent):
            yield place.parent, manifest


def remove(folder: Path) -> None:
    """Delete a quantized model's files, the manifest first, and its folder if that is then empty.

    Raise an ``OSError`` if a file cannot be deleted.
    """
    manifest = QuantizedManifest.read(folder)
    remove_files(folder, (MANIFEST, *(manifest.files if manifest else ())))


def remove_quantized(folder: Path) -> None:
    """Delete a quantized model; the next load quantizes its checkpoint again.

    Raise a ``ModelError`` if another process is quantizing to the folder, or if a file cannot be deleted.
    """
    busy = ModelError(f"another process quantizes to {folder}: wait for it")
    with (
        os_errors_as(ModelError, f"{folder} cannot be removed", "correct the permissions"),
        file_lock(lock_path(folder), busy, remove=True),
    ):
        remove(folder)


SCHEMES = {"q8_0": Q8_0, "q4_0": Q4_0}
ROUTERS = {"router", "gate"}
"""Names of modules that choose experts."""
BLOCKS = "blocks.safetensors"
DIGITS = 16
SPARE_BYTES = 1 << 26
"""Disk space in bytes to leave free."""


def quantized_folder(name: str, scheme: str, files: Sequence[Path], load: Callable[[], Any]) -> Path:
    """Return the folder that holds a checkpoint's weights in quantized blocks; quantize the checkpoint first if needed.

    ``files`` are all files that the weights depend on; ``load`` loads the model.
    """
    sources = tuple(map(Signature.of, files))
    for folder, manifest in quantized_manifests():
        if manifest.is_of(scheme) and sources in manifest.seen and manifest.is_whole(folder):
            _remember(manifest, folder)
            return folder
    settled = all(source.is_settled for source in sources)
    digest = hashlib.sha256("".join(map(content_hash, files)).encode()).hexdigest()
    folder = quantized_at_home(f"{Path(name).name.removesuffix(GGUF_SUFFIX)}-{scheme}", _key(scheme, digest))
    advice = "make room, or let HDTOOL_HOME name a folder with more"
    busy = ModelError(f"another process quantizes {name}")
    with os_errors_as(ModelError, f"{name} cannot be quantized to {folder}", advice), folder_lock(folder, busy):
        remove_scratch_folders(folder)
        quantized = QuantizedManifest.read(folder)  # another process may have written it meanwhile
        if quantized is None or not quantized.is_whole(folder):
            again = ", as files of it were damaged" if folder.is_dir() else ", once"
            print(f"note: quantizing {name} to {SCHEMES[scheme].name} in {folder}{again}", file=sys.stderr)
            quantized = _make(load(), name, scheme, folder, digest, sources, files)
            _remove_superseded(folder, scheme, sources)
        _remember(quantized.seen_as(sources) if settled else quantized, folder)
    return folder


def _remember(manifest: QuantizedManifest, folder: Path) -> None:
    """Write the manifest with the files' current ``stat`` fields, so that they aren't hashed again; ignore failures."""
    with suppress(OSError, ModelError):
        if (current := manifest.in_folder(folder)) != QuantizedManifest.read(folder):
            current.write(folder)


def read_quantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return a model's weights by name; those quantized to blocks stay memory-mapped."""
    manifest = QuantizedManifest.read(folder)
    try:
        assert manifest
        blocks, rest = load_file(folder / BLOCKS), load_file(folder / REST)
        weights: dict[str, torch.Tensor] = {
            name: CompactWeight(_matrix(blocks[name], FORMATS_BY_NAME[kind], name in manifest.transposed))
            for name, kind in manifest.kinds.items()
        }
    except (AssertionError, OSError, KeyError, SafetensorError) as error:
        raise ModelError(f"{folder} was changed while it was read ({error}): run the command again") from error
    return {
        **weights,
        **{name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in rest.items()},
    }


def _matrix(blocks: torch.Tensor, format: BlockFormat, is_transposed: bool) -> PackedMatrix:
    if blocks.dim() == 2:
        return PackedMatrix(blocks, format)
    return PackedExperts([PackedMatrix(blocks.flatten(0, 1), format)], len(blocks), is_transposed=is_transposed)


def _key(scheme: str, digest: str) -> str:
    words = f"{FORMAT} {metadata.version('transformers')} {scheme} {digest}"
    return hashlib.sha256(words.encode()).hexdigest()[:DIGITS]


def _make(
    model: Any, name: str, scheme: str, folder: Path, digest: str, sources: Sources, files: Sequence[Path]
) -> QuantizedManifest:
    """Quantize a model and write it to a folder; return its manifest. The caller must hold the folder's lock."""
    quantized = _quantized_weights(model, SCHEMES[scheme], WeightCheck(name))
    if kept := quantized.kept:
        total = len(kept) + len(quantized.kinds)
        print(
            f"note: {len(kept)} of {total} matrices stay as they are ({kept[0]}): their columns are no multiple of "
            f"{COLUMN_MULTIPLE}, their scales fit no float16, or hdtool does not compute their layers",
            file=sys.stderr,
        )
    stored = *quantized.blocks.values(), *quantized.rest.values()
    _check_room(name, sum(tensor.nbytes for tensor in stored), folder)
    with scratch_folder(folder) as place:
        _save(quantized.blocks, place / BLOCKS)
        _save(quantized.rest, place / REST)
        model.config.save_pretrained(place)
        model.generation_config.save_pretrained(place)
        written = list(place.iterdir())
        for file in written:
            shutil.copymode(place / "config.json", file)  # safetensors makes files that only their owner can read
            sync_to_disk(file)
        weights = [file for file in files if file.suffix != ".json"]
        manifest = QuantizedManifest(
            scheme,
            digest,
            fingerprint_of(weights),
            metadata.version("transformers"),
            {file.name: KeptFile.of(file, content_hash(file)) for file in written},
            quantized.kinds,
            quantized.transposed,
        )
        if sources != tuple(map(Signature.of, files)):
            raise ModelError(f"{name} was changed while it was read: run the command again")
        if folder.is_dir():
            (folder / MANIFEST).unlink(missing_ok=True)
            for file in written:
                file.replace(folder / file.name)
            manifest.in_folder(folder).write(folder)
        else:
            manifest.write(place)
            place.replace(folder)
    return manifest


class _Quantized(NamedTuple):
    blocks: dict[str, torch.Tensor]
    """Blocks of each quantized weight, by name: ``[rows, bytes]``, or ``[experts, rows, bytes]``."""
    kinds: dict[str, str]
    """Format of each quantized weight, by name."""
    transposed: list[str]
    rest: dict[str, torch.Tensor]
    """All other weights, by name."""
    kept: list[str]
    """Names of matrices that could not be quantized."""


def _quantized_weights(model: Any, format: BlockFormat, check: WeightCheck) -> _Quantized:
    """Check and quantize a model's weights; each is freed once it is quantized, to save memory."""
    arrange_experts(model)
    tables = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    matrices, fitting = set[int](), set[int]()
    for refs, weight in weight_parameters(model):
        if all(map(_is_of_experts, refs)) or all(map(_is_matrix, refs)):
            matrices.add(id(weight))
            if is_of_linear_layers(refs):
                fitting.add(id(weight))
    quantized, seen = _Quantized({}, {}, [], {}, []), set[int]()
    for name, weight in model.state_dict(keep_vars=True).items():
        if id(weight) in seen:  # a tied weight
            continue
        seen.add(id(weight))
        check.refuse_damaged(name, expand_compact(weight))
        kind = Q8_0 if id(weight) in tables else format
        is_router = not ROUTERS.isdisjoint(name.split("."))
        blocks = _blocks_of(weight, kind) if id(weight) in fitting and not is_router else None
        if blocks is not None:
            quantized.blocks[name], quantized.kinds[name] = blocks, kind.name
            if not weight.is_contiguous():
                quantized.transposed.append(name)
            weight.data = weight.data.new_empty(0)
            continue
        if id(weight) in matrices and not is_router:
            quantized.kept.append(name)
        narrow = narrowed(weight.detach())
        quantized.rest[name] = (weight.detach() if narrow is None else narrow).contiguous()
    check.finish()
    return quantized


def _blocks_of(weight: torch.Tensor, format: BlockFormat) -> torch.Tensor | None:
    """Return the blocks of a matrix or of all experts' matrices, or None if they cannot be quantized."""
    matrices = matrices_of(weight)
    if matrices.shape[-1] % COLUMN_MULTIPLE:
        return None
    matrix = quantize_matrix(matrices.flatten(0, -2), format)
    return matrix.blocks.unflatten(0, matrices.shape[:-1]) if matrix else None


def _is_matrix(place: ParameterRef) -> bool:
    module, name = place
    return name == "weight" and isinstance(module, torch.nn.Linear | torch.nn.Embedding)


def _is_of_experts(place: ParameterRef) -> bool:
    module, name = place
    return name in WEIGHTS and module.get_parameter(name).dim() == 3


def _check_room(name: str, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < needed + SPARE_BYTES:
        raise ModelError(
            f"{name} needs {needed:,} bytes in {folder.parent}, whose disk has {free:,}: make room, or let "
            "HDTOOL_HOME name a folder on another one"
        )


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # such as a full disk
        raise OSError(0, " ".join(str(error).split())) from error


def _remove_superseded(folder: Path, scheme: str, sources: Sources) -> None:
    """Delete models quantized from earlier content of the checkpoint's files, unless other files still have it."""
    paths = [source.path for source in sources]
    for other_folder, manifest in quantized_manifests():
        held = any(all(file.holds for file in seen) for seen in manifest.seen)
        was_here = any([file.path for file in seen] == paths for seen in manifest.seen)
        if other_folder == folder or manifest.scheme != scheme or held or not was_here:
            continue
        with (
            suppress(ModelError, OSError),
            file_lock(lock_path(other_folder), ModelError(f"another process uses {other_folder}")),
        ):
            remove(other_folder)
