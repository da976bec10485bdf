"""Finds the converted model of a GGUF file in hdtool's home, or converts the file.

A file is recognized by its signature or its content hash. New files are written to a temporary folder and then moved,
so a converted model is either complete or absent.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from hdtool.data.durable_files import file_lock, folder_lock, lock_path, remove_scratch_folders, scratch_folder
from hdtool.data.errors import ModelError, os_errors_as
from hdtool.data.gguf_header import GGUFHeader, GGUFTensor
from hdtool.data.output_files import sync_to_disk
from hdtool.data.stores.home import converted_at_home
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_GGUF_TYPE
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.model.gguf.convert import PLAIN, Conversion
from hdtool.runtime.model.gguf.converted_folder import (
    FORMAT,
    PACKING,
    WEIGHT_FILES,
    Manifest,
    Signature,
    content_hash,
    manifests,
    remove,
)
from hdtool.runtime.model.gguf.packing import packable

NAMES = {
    10: "Q2_K",
    11: "Q3_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
"""Names of the formats that transformers reads but no matmul supports, by type number."""


def slow_weights(header: GGUFHeader) -> str | None:
    """Describe how many quantized matrices must be expanded to float32 and why; return None if there are none."""
    matrices = [tensor for tensor in header.tensors if len(tensor.shape) > 1]
    packed = {tensor.offset for tensor in packable(header)}
    slow = [matrix for matrix in matrices if matrix.kind not in PLAIN and header.data + matrix.offset not in packed]
    if not slow:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(map(_reason, slow)).most_common())
    return f"{len(slow)} of {len(matrices)} weights are computed in float32, slower and larger ({reasons})"


def _reason(tensor: GGUFTensor) -> str:
    if tensor.kind not in FORMATS_BY_GGUF_TYPE:
        return f"in {NAMES.get(tensor.kind, f'format {tensor.kind}')}"
    name = FORMATS_BY_GGUF_TYPE[tensor.kind].name
    if not EXPANDS_FLOAT16:
        return f"in {name} on a processor that cannot convert float16"
    return f"in {name} with {tensor.shape[-1]} columns"


FINGERPRINT_DIGITS = 16
SPARE_BYTES = 1 << 26
"""Disk space in bytes to leave free after a conversion."""


def converted(file: Path, *, weights: bool = False, packed: bool = False) -> Path:
    """Return the folder with a GGUF file's model in the layout of ``save_pretrained``; convert the file if needed.

    Without ``weights``, the folder may hold only the configuration and the tokenizer. With ``packed``, it also has the
    packing plan and the weights that can't stay packed.
    """
    signature = Signature.of(file)
    current = {folder: manifest for folder, manifest in manifests() if manifest.is_current}
    for folder, manifest in current.items():
        if signature in manifest.seen and _has(manifest, weights, packed):
            return folder
    conversion, settled = Conversion.of(file), signature.is_settled
    digest = content_hash(file)
    # A copy under another name has the same content.
    copies = (folder for folder, manifest in current.items() if manifest.sha256 == digest)
    folder = next(copies, converted_at_home(file.stem, _fingerprint(digest)))
    if folder not in current or not _has(current[folder], weights, packed):
        advice = "make room, or let HDTOOL_HOME name a folder with more"
        with (
            os_errors_as(ModelError, f"{file} cannot be converted to {folder}", advice),
            folder_lock(folder, ModelError(f"another process converts {file}")),
        ):
            _complete(conversion, folder, digest, signature, weights, packed)
    if settled:
        _remember(folder, signature)
    return folder


def stays_packed(file: Path) -> bool:
    """Return True if any weights of the file can stay in their quantized blocks."""
    signature = Signature.of(file)
    if any(signature in manifest.seen and manifest.has_packed for _, manifest in manifests()):
        return True
    return bool(packable(GGUFHeader.read(file)))


def _has(manifest: Manifest, weights: bool, packed: bool) -> bool:
    return manifest.has_weights >= weights and manifest.has_packed >= packed


def remove_converted(folder: Path, manifest: Manifest) -> None:
    """Delete a converted model; the next load converts its file again.

    Raise a ``ModelError`` if another process is converting to the folder, or if a file cannot be deleted.
    """
    busy = ModelError(f"another process converts to {folder}: wait for it")
    with (
        os_errors_as(ModelError, f"{folder} cannot be removed", "correct the permissions"),
        file_lock(lock_path(folder), busy, remove=True),
    ):
        remove(folder, manifest)


def _fingerprint(digest: str) -> str:
    words = f"{FORMAT} {metadata.version('transformers')} {digest}"
    return hashlib.sha256(words.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def _complete(
    conversion: Conversion, folder: Path, digest: str, signature: Signature, weights: bool, packed: bool
) -> None:
    """Write the requested parts that the folder lacks. The caller must hold the folder's lock."""
    remove_scratch_folders(folder)
    manifest = Manifest.read(folder)  # another process may have written it meanwhile
    if manifest is None:
        print(f"note: reading {conversion.file} into {folder}, once", file=sys.stderr)
        manifest = _with_configuration(conversion, folder, digest, signature)
        _remove_superseded(folder, signature)
    try:
        _complete_weights(conversion, folder, manifest, signature, weights, packed)
    except ModelError:
        kept = Manifest.read(folder)
        if kept and not kept.has_weights and not kept.has_packed:
            remove(folder, kept)  # a configuration is of no use without weights
        raise


def _complete_weights(
    conversion: Conversion, folder: Path, manifest: Manifest, signature: Signature, weights: bool, packed: bool
) -> None:
    file = conversion.file
    if packed and not manifest.has_packed:
        print(f"note: finding the packed weights of {file}, once", file=sys.stderr)
        manifest = replace(manifest, packing=PACKING, slow=slow_weights(conversion.header) or "")
        manifest = _with_weights(conversion.write_packed, file, folder, manifest, signature)
    if weights and not manifest.has_weights:
        _check_room(conversion, folder)
        print(f"note: converting the weights of {file}, once: {conversion.bytes:,} bytes in {folder}", file=sys.stderr)
        _with_weights(conversion.write_weights, file, folder, manifest, signature)


def _with_configuration(conversion: Conversion, folder: Path, digest: str, signature: Signature) -> Manifest:
    with scratch_folder(folder) as place:
        conversion.write_configuration(place)
        files = {path.name: path.stat().st_size for path in place.iterdir()}
        manifest = Manifest(digest, metadata.version("transformers"), files, slow=slow_weights(conversion.header) or "")
        manifest.write(place)
        for written in place.iterdir():
            sync_to_disk(written)
        _check_unchanged(conversion.file, signature)
        if folder.is_dir():  # one of its files was removed or changed
            for name in WEIGHT_FILES:  # they may be damaged, and the manifest does not list them
                (folder / name).unlink(missing_ok=True)
            for name in manifest.files:
                (place / name).replace(folder / name)
            manifest.write(folder)
        else:
            place.replace(folder)
    return manifest


def _check_room(conversion: Conversion, folder: Path) -> None:
    needed, free = conversion.bytes, shutil.disk_usage(folder).free
    if free < needed + SPARE_BYTES:
        raise ModelError(
            f"{conversion.file} needs {needed:,} bytes in {folder.parent}, whose disk has {free:,}: make room, or let "
            "HDTOOL_HOME name a folder on another one"
        )


def _with_weights(
    write: Callable[[Path, Path], Sequence[Path]], file: Path, folder: Path, manifest: Manifest, signature: Signature
) -> Manifest:
    """Add weight files to a folder; return its new manifest.

    ``write`` takes the folder, whose configuration it reads, and a temporary folder, in which it makes the files.
    """
    with scratch_folder(folder) as place:
        paths = write(folder, place)
        for written in paths:
            shutil.copymode(folder / "config.json", written)  # safetensors makes files that only their owner can read
            sync_to_disk(written)
        _check_unchanged(file, signature)
        for written in paths:
            written.replace(folder / written.name)
    files = {written.name: (folder / written.name).stat().st_size for written in paths}
    manifest = replace(manifest, files={**manifest.files, **files})
    manifest.write(folder)
    return manifest


def _check_unchanged(file: Path, signature: Signature) -> None:
    if Signature.of(file) != signature:
        raise ModelError(f"{file} was changed while it was read: run the command again")


def _remember(folder: Path, signature: Signature) -> None:
    """Add a file's signature to the manifest of its converted model, so that the file isn't hashed again.

    Do nothing if the manifest can't be written.
    """
    busy = ModelError(f"another process converts to {folder}")
    with suppress(ModelError, OSError), file_lock(lock_path(folder), busy):
        if manifest := Manifest.read(folder):
            manifest.seen_as(signature).write(folder)


def _remove_superseded(folder: Path, signature: Signature) -> None:
    """Delete the file's earlier conversions, made from other contents or by another version of transformers.

    A conversion is kept if another file still has the content that it was made from.
    """
    for other_folder, manifest in manifests():
        files = {signature_.path: signature_ for signature_ in manifest.seen}
        if (
            other_folder == folder
            or not files.pop(signature.path, None)
            or any(signature_.holds for signature_ in files.values())
        ):
            continue
        busy = ModelError(f"another process converts to {other_folder}")
        with suppress(ModelError, OSError), file_lock(lock_path(other_folder), busy):
            remove(other_folder, manifest)
