"""What a measured llama.cpp is: its version, the SIMD features that it was built with, and the files that it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hdtool.data.errors import ModelError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.kernels.vector_code import has_feature
from hdtool.runtime.model.load import Loaded

CPU_FEATURES = {
    "AVX": "avx",
    "AVX2": "avx2",
    "F16C": "f16c",
    "FMA": "fma",
    "BMI2": "bmi2",
    "AVX_VNNI": "avxvnni",
    "AVX512": "avx512f",
    "AVX512_VBMI": "avx512vbmi",
    "AVX512_VNNI": "avx512vnni",
    "AVX512_BF16": "avx512bf16",
    "AMX_INT8": "amx-int8",
    "NEON": "neon",
    "DOTPROD": "dotprod",
    "MATMUL_INT8": "i8mm",
    "SVE": "sve",
}
"""Extensions of processors by the name that llama.cpp's system_info prints, with LLVM's name."""
GPU = "GPU offload"
KEY = "llama_cpp_build"
"""The name of the description among the surroundings of a run."""
UNKNOWN = "unknown quantization"


def describe_build(files: Mapping[str, Path], *, on_gpu: bool) -> dict[str, Any]:
    """The installed llama.cpp and the file of each of its rows, as JSON has them."""
    import llama_cpp

    features = features_of(llama_cpp.llama_print_system_info().decode())
    lacking = [name for name, known in CPU_FEATURES.items() if has_feature(known) and name not in features]
    if on_gpu:
        # The features of the CPU matter little then.
        lacking = [] if llama_cpp.llama_supports_gpu_offload() else [GPU]
    own_version = getattr(llama_cpp, "llama_version", None)  # since 2026
    return {
        "version": str(llama_cpp.__version__),
        "llama_cpp_version": own_version().decode() if own_version else None,
        "features": features,
        "lacking": lacking,
        "files": {
            name: {"file": file.name, "quantization": quantization_of(GGUFHeader.read(file))}
            for name, file in files.items()
        },
    }


def features_of(system_info: str) -> list[str]:
    """The features that system_info says a build has, as in ``CPU : AVX2 = 1 | AVX512 = 0 |``."""
    found = []
    for part in system_info.split("|"):
        name, equals, value = part.rpartition(":")[2].partition("=")
        if equals and value.strip() not in ("", "0"):
            found.append(name.strip())
    return found


def quantization_of(header: GGUFHeader) -> str:
    """The name of a file's quantization, as in Q4_K_M; that of most of its weights where the file doesn't say it."""
    from gguf import GGMLQuantizationType, LlamaFileType

    try:
        named = LlamaFileType(header.values.get("general.file_type", -1))
        if named is not LlamaFileType.GUESSED:
            return named.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # absent, or newer than the library
        pass
    weights = Counter[int]()
    for tensor in header.tensors:
        weights[tensor.kind] += tensor.numbers
    try:
        return GGMLQuantizationType(weights.most_common(1)[0][0]).name
    except (ValueError, IndexError):
        return UNKNOWN


def notes_of(surroundings: Mapping[str, Any]) -> list[str]:
    """What a reader must know to judge the rows of llama.cpp in a run; nothing without such rows."""
    build = surroundings.get(KEY)
    if build is None:
        return []
    files = ", ".join(f"{name} on {of['file']} ({of['quantization']})" for name, of in build["files"].items())
    own = f" (llama.cpp {build['llama_cpp_version']})" if build["llama_cpp_version"] else ""
    notes = [files, f"llama-cpp-python {build['version']}{own}, built with {', '.join(build['features']) or 'no SIMD'}"]
    if build["lacking"]:
        notes.append(
            f"This build of llama.cpp is not its fastest: it lacks {', '.join(build['lacking'])}, which this machine "
            f"has. Build it with CMAKE_ARGS=-D{'GGML_CUDA' if GPU in build['lacking'] else 'GGML_NATIVE'}=ON"
        )
    return notes


def check_file(file: Path) -> None:
    """Refuse what is no GGUF file, before a model is loaded."""
    if not file.is_file():
        raise ModelError(f"--llama-cpp-file names {file}, which is no file: name a GGUF file of the same model")
    GGUFHeader.read(file)


def check_same_model(file: Path, loaded: Loaded) -> None:
    """Refuse a file whose sizes are not those of the loaded model."""
    header, config = GGUFHeader.read(file), loaded.target.model.config.get_text_config()
    sizes = {
        "layers": (header.values.get(f"{header.architecture}.block_count"), config.num_hidden_layers),
        "columns": (header.values.get(f"{header.architecture}.embedding_length"), config.hidden_size),
    }
    for what, (found, wanted) in sizes.items():
        if found is not None and found != wanted:
            raise ModelError(
                f"--llama-cpp-file names {file}, a model of {found} {what}, and {loaded.name} has {wanted}: name a "
                "GGUF file of the same model"
            )
    tokens = header.values.get("tokenizer.ggml.tokens")
    # Files are padded, tokenizers are not.
    if isinstance(tokens, int) and tokens < len(loaded.tokenizer):
        raise ModelError(
            f"--llama-cpp-file names {file}, with {tokens:,} tokens, and the tokenizer of {loaded.name} has "
            f"{len(loaded.tokenizer):,}: name a GGUF file of the same model"
        )
