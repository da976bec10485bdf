"""Whether a model could be computed in compiled passes, by its modules alone: no weight is read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
from torch.nn import Embedding, Linear, Module

from hdtool.runtime.engines.cpu.compiled_kind import COMPILED, scale_of
from hdtool.runtime.engines.model_parts import model_parts
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE
from hdtool.runtime.model.library import text_class


def _multiplies(module: Any) -> bool:
    return type(module) is Linear and module.in_features % COLUMN_MULTIPLE == 0


def _embeds(module: Module) -> bool:
    return (type(module) is Embedding or scale_of(module) is not None) and cast(Embedding, module).max_norm is None


OUTLINE = cast(Any, replace(COMPILED, multiplies=_multiplies, fits=lambda weight: True, embeds=_embeds))
"""What is compiled, of modules before their weights are there."""


def may_be_compiled(settings: Any) -> bool:
    """Whether a model with this configuration has the modules of the kind that is compiled.

    The proof at loading decides. A model that the library makes in another way may be one.
    """
    try:
        from accelerate import init_empty_weights
        from transformers.initialization import no_init_weights

        with init_empty_weights(include_buffers=False), no_init_weights():
            auto = text_class(settings, trust_remote_code=False)
            model = auto.from_config(settings, dtype=torch.float32)
        return model_parts(model, OUTLINE) is not None
    except Exception:  # of a library, whose loading words it
        return True
