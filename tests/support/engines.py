"""Engines by name, with a tiny model each: every family on each engine that computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.engines.proofs import recurrent_tree_proof as recurrences
from hdtool.runtime.kernels.matrix_formats import GGUF_FORMATS
from hdtool.runtime.kernels.vector_code import EXPANDS_FLOAT16
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support import described, families, fused
from tests.support.families import FAMILIES, HYBRIDS, IN_DOUBLE
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.rehearsed import Rehearsed, direct
from tests.sweep.models import tiny_model

CHAINED = (
    *("bloom", "gpt_neo", "zaya", "mpt", "falcon", "deepseek_v4", "glm5_next", "inkling_text", "minimax_m3_vl_text"),
    "qwen4_exp_text",
)
"""Types whose models verify chains of drafts instead of trees; Falcon does so with ALiBi."""
INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text", "mistral_large4")
"""Types with indexed attention."""

PACKED = [one.name for one in GGUF_FORMATS] if EXPANDS_FLOAT16 else []
"""Formats whose weights stay packed."""


@dataclass(frozen=True)
class Engine:
    """Target, and transformers' model with the same weights."""

    target: Target
    model: Any
    is_in_use: Callable[[Target], bool] = lambda target: True
    """Function that returns True if this engine, and not transformers' code, still computes the passes."""
    passes: Callable[[Target], int] = lambda target: target.log.passes
    """Function that returns the number of passes that this engine has computed."""
    is_rounded: bool = False
    """True if the engine rounds activations, so that its logits only approximate those of transformers."""


def stock(family: str, dtype: torch.dtype = torch.float32) -> Engine:
    model = families.model_of(family, dtype)
    return Engine(Target(model, never), model)


def in_levels(family: str) -> Engine:
    """Create an engine as if hdtool had no description of the model's mixers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recurrences, "described_mixers", lambda model, shapes: {})
        return stock(family)


def tiny(kind: str) -> Engine:
    alibi: dict[str, Any] = {"without": ("head_dim", "num_key_value_heads"), "alibi": True}
    target = Target(families.random_model("Falcon", **alibi) if kind == "falcon" else tiny_model(kind), never)
    return Engine(target, target.model, lambda target: target.takes_trees == (kind not in CHAINED))


def captured(family: str) -> Engine:
    target = Target(families.model_of(family), lambda device: Rehearsed())
    return Engine(target, target.model, lambda target: target.captures)


def captured_program(name: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        fused.widen(patch)
        target = Target(described.model_of(name), direct)
    return Engine(target, target.model, lambda target: target.is_fused)


def compiled(kind: str, dtype: torch.dtype = torch.float32) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        fused.widen(patch)
        target = fused.compiled_target(kind, dtype)
        return Engine(target, fused.model_of(kind, dtype), is_compiled, compiled_passes)


def compiled_program(name: str) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        fused.widen(patch, head_dim=32)
        target = described.compiled_of(name)
    return Engine(target, target.model, is_compiled, compiled_passes)


def packed(kind: str, activations: str = "float32") -> Engine:
    """Create an engine whose weights stay in the blocks of a GGUF file, with heads as wide as vectors."""
    model = tiny_llama(hidden_size=256, intermediate_size=512)
    with TemporaryDirectory() as folder:
        file = write_gguf(Path(folder) / "tiny.gguf", model, kind)
        target = load(ModelConfig(str(file), device="cpu", activations=activations)).target
    return Engine(
        target, target.model, is_compiled, compiled_passes, is_rounded=fused.compiled(target).activations_are_int8
    )


def is_compiled(target: Target) -> bool:
    return fused.compiled(target).is_current


def compiled_passes(target: Target) -> int:
    return fused.compiled(target).passes


CORE: dict[str, Callable[[], Engine]] = {
    "stock": partial(stock, "llama"),
    "captured": partial(captured, "llama"),
    "compiled": partial(compiled, "llama"),
    "compiled, 16 bits": partial(compiled, "llama", torch.bfloat16),
    "chains": partial(tiny, "bloom"),
}
OF_FAMILIES: dict[str, Callable[[], Engine]] = {
    **{f"stock {family}": partial(stock, family) for family in FAMILIES},
    **{f"stock {family} in float64": partial(stock, family, torch.float64) for family in IN_DOUBLE},
    **{f"{family} in levels": partial(in_levels, family) for family in HYBRIDS},
    **{f"stock tiny {kind}": partial(tiny, kind) for kind in (*CHAINED, *INDEXED)},
    **{f"captured {family}": partial(captured, family) for family in FAMILIES if family != "jamba"},
    **{f"captured program of {name}": partial(captured_program, name) for name in described.DESCRIBED_MODELS},
    **{f"compiled {kind}": partial(compiled, kind) for kind in fused.KINDS},
    **{f"compiled {kind}, 16 bits": partial(compiled, kind, torch.bfloat16) for kind in fused.KINDS},
    **{f"compiled program of {name}": partial(compiled_program, name) for name in described.DESCRIBED_MODELS},
    **{f"compiled {kind}": partial(packed, kind) for kind in PACKED},
    **{f"compiled {kind} in int8": partial(packed, kind, "int8") for kind in PACKED},
}


@cache
def engine_of(name: str) -> Engine:
    """Return an engine by name; it is created, with its compilation or captures and its proofs, only once."""
    return (CORE | OF_FAMILIES)[name]()
