"""The hidden states that a model's output layer reads: found on the model itself, wherever its family has them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hdtool.data.errors import FamilyError


def hidden_in(returned: object) -> torch.Tensor | None:
    """The hidden states ``[batch, tokens, width]`` in what a part of a model returned, if it returned some."""
    found = getattr(returned, "last_hidden_state", None)
    return found if isinstance(found, torch.Tensor) and found.dim() == 3 else None


def module_of_hidden(model: torch.nn.Module, kind: str, run: Callable[[], object]) -> torch.nn.Module:
    """The part of the model that gives them to the output layer; ``run`` has the model make a pass."""
    given: list[torch.nn.Module] = []

    def see(module: torch.nn.Module, _: object, returned: object) -> None:
        if hidden_in(returned) is not None:
            given.append(module)

    handles = [module.register_forward_hook(see) for module in model.modules()]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    if not given:
        raise FamilyError(
            f"models of type {kind!r} cannot have heads: this one does not show the hidden states that its output "
            "layer reads"
        )
    return given[-1]
