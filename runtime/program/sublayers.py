"""Recognizes the attention, mixer and MLP of a decoder layer."""

from __future__ import annotations

from typing import NamedTuple

from torch.nn import Module

from hdtool.runtime.program.llama_like_families import Family
from hdtool.runtime.program.mixer_parts import READERS
from hdtool.runtime.program.side_block import modules_of


class Sublayers(NamedTuple):
    """The modules of a layer that mix tokens or compute an MLP; None for each that the layer lacks."""

    attention: Module | None
    mixer: Module | None
    feed: Module | None
    """MLP or mixture of experts."""


def sublayers_of(layer: Module, family: Family) -> Sublayers | None:
    """Return the sublayers of a layer, or None if a layer of the family can't have this combination of sublayers."""
    names, children = family.names, modules_of(layer, family)
    mixers = [name for name in family.layer.mixers if type(children.get(name)).__name__ in READERS]
    mixer = children[mixers[0]] if mixers else None
    attention, feed = children.get(names.attention), children.get(names.mlp)
    attention = None if attention is mixer else attention
    if family.side:
        is_known = mixer is not None and (attention is None) == (feed is None)
        return Sublayers(attention, mixer, feed) if is_known else None
    if family.layer.is_single:
        if mixer is not None or attention is None:
            return Sublayers(None, mixer, None) if mixer is not None else None
        attends = type(attention).__name__ == family.attention.class_name
        return Sublayers(attention, None, None) if attends else Sublayers(None, None, feed)
    if feed is None or [attention is None, mixer is None].count(False) != 1 + family.layer.adds_mixers:
        return None
    return Sublayers(attention, mixer, feed)
