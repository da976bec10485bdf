"""Decoding: one prompt by itself, or many in turn."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence

from hdtool.data.errors import HdtoolError
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.engine import Engine
from hdtool.runtime.loop import Key, Loop, Outcome, Request
from hdtool.runtime.prefix_cache import PrefixCache
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sequence import Step


def decode(
    engine: Engine,
    prompt: Sequence[int],
    sampler: Sampler,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    drafter: Drafter | None = None,
    prediction: Sequence[int] = (),
    prefix_caching: bool = True,
) -> Generator[Step]:
    """Answer a prompt, one step after another.

    A ``prediction`` is what the answer will probably look like: it is drafted from, and never read by the model. With
    ``prefix_caching``, the model does not read again what the prompt shares with the start of the last conversation.
    """
    prefixes = PrefixCache() if prefix_caching else None
    loop: Loop[None] = Loop(engine, engine.cache, max_new_tokens=max_new_tokens, stops=stops, prefixes=prefixes)
    request = Request(None, prompt, sampler, drafter or NoDraft(), prediction=prediction)
    try:
        _, step = _checked(loop.add(request))
        while not step.finish:
            if engine.captures:  # text of a step is made while the device computes the next one
                loop.launch()
                yield step
                outcomes = loop.finish()
            else:
                yield step
                outcomes = loop.step()
            _, step = _checked(outcomes[0])
        yield step
    finally:
        loop.end()


def decode_batch(
    engine: Engine,
    next_request: Callable[[], Request[Key] | None],
    size: int,
    *,
    max_new_tokens: int,
    stops: Container[int] = (),
    prefix_caching: bool = False,
) -> Iterator[tuple[Request[Key], Step]]:
    """Answer prompts in ``size`` batch slots; finished requests are replaced (continuous batching).

    ``next_request`` is called whenever a slot is free, so a request may depend on earlier answers. If it returns
    None, it is called again after the next step. With ``prefix_caching``, what prompts share is read once.
    """
    prefixes = PrefixCache() if prefix_caching else None
    loop: Loop[Key] = Loop(engine, engine.allocate(size), max_new_tokens=max_new_tokens, stops=stops, prefixes=prefixes)
    try:
        while True:
            while not loop.is_full and (request := next_request()) is not None:
                yield _checked(loop.add(request))
            if not len(loop):
                return
            for outcome in loop.step():
                yield _checked(outcome)
    finally:
        loop.end()


def _checked(outcome: Outcome[Key]) -> tuple[Request[Key], Step]:
    request, step = outcome
    if isinstance(step, HdtoolError):
        raise step
    return request, step
