"""Finds the module of a model that returns the hidden states which the output layer reads."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdtool.data.errors import FamilyError


def hidden_in(returned: object) -> torch.Tensor | None:
    """The hidden states ``[batch, tokens, width]`` in the output of a module, if there are any."""
    found = getattr(returned, "last_hidden_state", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 3 else None


def module_of_hidden(model: torch.nn.Module, kind: str, run: Callable[[], object]) -> torch.nn.Module:
    """The last module that returns hidden states; ``run`` makes a forward pass of the model."""
    found: list[torch.nn.Module] = []

    def record(module: torch.nn.Module, _: object, returned: object) -> None:
        if hidden_in(returned) is not None:
            found.append(module)

    handles = [module.register_forward_hook(record) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one does not return the hidden states that its output "
            "layer reads"
        )
    return found[-1]
