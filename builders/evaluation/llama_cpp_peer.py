"""Benchmark contenders that run llama.cpp on GGUF files of the model, and a description of the llama.cpp build."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hdtool.builders.evaluation.contenders import PassCounter
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.errors import ModelError, error_reason
from hdtool.data.gguf_header import GGUFHeader
from hdtool.runtime.core.request import room_for
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.kernels.vector_code import has_feature
from hdtool.runtime.settings.measuring import LLAMA_CPP, OTHER_FILE
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.weights.gguf_file import gguf_file

LLAMA_CPP_PACKAGE = "llama-cpp-python"
OWN_FILE_ROWS = tuple(name for name in LLAMA_CPP if name != OTHER_FILE)
CPU_LOOKUP_TOKENS, GPU_LOOKUP_TOKENS = 2, 10
"""Number of tokens drafted by prompt lookup, as in the documentation of llama-cpp-python."""
MIN_CONTEXT = 2048
"""Minimum KV cache size in tokens; a longer question reloads the model outside the measured time."""

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
"""Maps CPU features as printed by llama.cpp's system_info to LLVM's names."""
GPU_FEATURE = "GPU offload"
BUILD_KEY = "llama_cpp_build"
"""Key of the build description in a run's ``surroundings``."""
UNKNOWN_QUANTIZATION = "unknown quantization"


def row_files(model: ModelConfig, other_file: str | None = None) -> dict[str, Path]:
    """Map llama.cpp contenders to GGUF files: ``OTHER_FILE`` to ``other_file``, all others to the model's file.

    Contenders without a file are left out.
    """
    own_file = gguf_file(model)
    files = dict.fromkeys(OWN_FILE_ROWS, own_file) if own_file else {}
    return files | ({OTHER_FILE: Path(other_file).expanduser()} if other_file else {})


def exclusion_reason(name: str, files: Mapping[str, Path], model: ModelConfig, sampling: SamplingConfig) -> str:
    """Return why a llama.cpp contender cannot take part, to be printed after the contender's name; empty if it can."""
    if name not in files:
        return f"runs on GGUF files, and {model.name} is none: name one with --model"
    if not find_spec("llama_cpp"):
        return f"needs {LLAMA_CPP_PACKAGE}, not installed here: pip install {LLAMA_CPP_PACKAGE}"
    if not sampling.is_greedy or sampling.repetition_penalty not in (None, 1.0):
        return "is measured with greedy answers alone: leave it out, or --temperature and --repetition-penalty"
    return ""


class LlamaCppContender:
    """llama.cpp, plain or with prompt lookup; answers greedily with hdtool's prompt ids, stop tokens and length limit.

    Its matmuls round activations to few bits, so its answers may differ from answers computed in float32.
    """

    def __init__(self, loaded: Loaded, file: Path, max_new_tokens: int, *, lookup: bool) -> None:
        self._loaded = loaded
        self._file = file
        self._max_new_tokens = max_new_tokens
        self._looks_up = lookup
        self._context = 0
        self._llama: Any = None
        self._passes = PassCounter(0)

    def fresh(self) -> LlamaCppContender:
        return self  # every answer starts with an empty KV cache, and there is no other state

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        assert guide is None, "its grammars are its own, so the answers could not be compared"
        room, at_the_end = room_for(self._loaded.target, prompt, self._max_new_tokens)
        self._provide(len(prompt) + room)
        # Without this, llama.cpp would reuse the KV cache of the prefix shared with the previous prompt.
        self._llama.reset()
        self._passes = passes = PassCounter(len(prompt))
        with Stopwatch(torch.device("cpu")) as watch:
            output_ids = self._generated(prompt, room, watch)
        return passes.answer(self._loaded, output_ids, watch, at_the_end, drafts=self._looks_up)

    def _generated(self, prompt: list[int], room: int, watch: Stopwatch) -> list[int]:
        output_ids: list[int] = []
        for token in self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            watch.first_token()
            output_ids.append(int(token))
            if len(output_ids) == room or token in self._loaded.stops:
                break
        return output_ids

    def _provide(self, tokens: int) -> None:
        """Load the model, or raise a ModelError, unless it is loaded with a KV cache of at least ``tokens`` tokens."""
        if self._context >= tokens:
            return
        from llama_cpp import Llama

        self._context = max(MIN_CONTEXT, 1 << (tokens - 1).bit_length())
        threads, on_gpu = torch.get_num_threads(), self._loaded.target.device.type == "cuda"
        self._llama = None  # free its memory first
        try:
            self._llama = Llama(
                str(self._file),
                n_ctx=self._context,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if on_gpu else 0,
                # Drafts are verified with the logits of all positions; without this option, the buffer is too small for
                # long prompts.
                logits_all=self._looks_up,
                draft_model=self._lookup(GPU_LOOKUP_TOKENS if on_gpu else CPU_LOOKUP_TOKENS)
                if self._looks_up
                else None,
                verbose=False,
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise ModelError(
                f"llama.cpp cannot load {self._file} ({error_reason(error)}): leave llama.cpp out of --methods, or "
                f"install another {LLAMA_CPP_PACKAGE}"
            ) from error

    def _lookup(self, max_tokens: int) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft: Any = LlamaPromptLookupDecoding(num_pred_tokens=max_tokens)

        def counted(context: Any, **options: Any) -> Any:
            draft_ids = draft(context, **options)
            self._passes.note(len(context), len(draft_ids))
            return draft_ids

        return counted


def describe_build(files: Mapping[str, Path], *, on_gpu: bool) -> dict[str, Any]:
    """Return a JSON-compatible description of the installed llama.cpp and of each contender's GGUF file."""
    import llama_cpp

    features = build_features(llama_cpp.llama_print_system_info().decode())
    lacking = [name for name, known in CPU_FEATURES.items() if has_feature(known) and name not in features]
    if on_gpu:
        # On a GPU, CPU features matter little.
        lacking = [] if llama_cpp.llama_supports_gpu_offload() else [GPU_FEATURE]
    own_version = getattr(llama_cpp, "llama_version", None)  # exists since 2026
    return {
        "version": str(llama_cpp.__version__),
        "llama_cpp_version": own_version().decode() if own_version else None,
        "features": features,
        "lacking": lacking,
        "files": {
            name: {"file": file.name, "quantization": quantization_name(GGUFHeader.read(file))}
            for name, file in files.items()
        },
    }


def build_features(system_info: str) -> list[str]:
    """Return the enabled features listed in llama.cpp's system_info, such as ``CPU : AVX2 = 1 | AVX512 = 0 |``."""
    features = []
    for part in system_info.split("|"):
        name, equals, value = part.rpartition(":")[2].partition("=")
        if equals and value.strip() not in ("", "0"):
            features.append(name.strip())
    return features


def quantization_name(header: GGUFHeader) -> str:
    """Return the quantization named in a GGUF file's header, such as Q4_K_M.

    If the header names none that is known, return the most common type of its weights or, if that is unknown too,
    ``UNKNOWN_QUANTIZATION``.
    """
    from gguf import GGMLQuantizationType, LlamaFileType

    try:
        file_type = LlamaFileType(header.values.get("general.file_type", -1))
        if file_type is not LlamaFileType.GUESSED:
            return file_type.name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:  # absent, or newer than the library
        pass
    weights = Counter[int]()
    for tensor in header.tensors:
        weights[tensor.kind] += tensor.numbers
    try:
        return GGMLQuantizationType(weights.most_common(1)[0][0]).name
    except (ValueError, IndexError):
        return UNKNOWN_QUANTIZATION


def build_notes(surroundings: Mapping[str, Any]) -> list[str]:
    """Return notes on llama.cpp's results, such as missing CPU features; empty if llama.cpp was not measured."""
    build = surroundings.get(BUILD_KEY)
    if build is None:
        return []
    files = ", ".join(f"{name} on {about['file']} ({about['quantization']})" for name, about in build["files"].items())
    version_note = f" (llama.cpp {build['llama_cpp_version']})" if build["llama_cpp_version"] else ""
    notes = [
        files,
        f"llama-cpp-python {build['version']}{version_note}, built with {', '.join(build['features']) or 'no SIMD'}",
    ]
    if build["lacking"]:
        notes.append(
            f"This build of llama.cpp is not its fastest: it lacks {', '.join(build['lacking'])}, which this machine "
            f"has. Build it with CMAKE_ARGS=-D{'GGML_CUDA' if GPU_FEATURE in build['lacking'] else 'GGML_NATIVE'}=ON"
        )
    return notes


def check_file(file: Path) -> None:
    """Raise a ``ModelError`` unless ``file`` is a GGUF file; only its header is read."""
    if not file.is_file():
        raise ModelError(f"--llama-cpp-file names {file}, which is no file: name a GGUF file of the same model")
    GGUFHeader.read(file)


def check_same_model(file: Path, loaded: Loaded) -> None:
    """Raise a ``ModelError`` if the file has another layer count or hidden size, or fewer tokens than the tokenizer.

    More tokens may be padding. Fields that the header lacks aren't compared.
    """
    header, config = GGUFHeader.read(file), loaded.target.model.config.get_text_config()
    sizes = {
        "layers": (header.values.get(f"{header.architecture}.block_count"), config.num_hidden_layers),
        "columns": (header.values.get(f"{header.architecture}.embedding_length"), config.hidden_size),
    }
    for what, (file_size, model_size) in sizes.items():
        if file_size is not None and file_size != model_size:
            raise ModelError(
                f"--llama-cpp-file names {file}, a model of {file_size} {what}, and {loaded.name} has {model_size}: "
                "name a GGUF file of the same model"
            )
    tokens = header.values.get("tokenizer.ggml.tokens")
    # Vocabularies of files may be padded, so a file may have more tokens than the tokenizer.
    if isinstance(tokens, int) and tokens < len(loaded.tokenizer):
        raise ModelError(
            f"--llama-cpp-file names {file}, with {tokens:,} tokens, and the tokenizer of {loaded.name} has "
            f"{len(loaded.tokenizer):,}: name a GGUF file of the same model"
        )
