"""Decode plainly while the drafter is compiled in another process, and draft as soon as it is ready."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache
from threading import Thread

from hdtool.runtime.core.drafter import Drafter, NoDraft, WrappedDrafter, draft_many
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.drafter_factory import compile_hierarchy
from hdtool.runtime.kernels.compile_process import DRAFTER, is_compiling, wait_until_compiled
from hdtool.runtime.settings.decoding import HIERARCHIES, METHODS


def deferred(method: str, make: Callable[[], list[Drafter]], number: int) -> list[Drafter]:
    """Return the ``number`` drafters that ``make`` makes, or stand-ins for them while their code is being compiled.

    Drafts change no token, so the answer is the same whenever the drafters join. Trained drafters are not deferred,
    because some of them change how passes are computed. ``make`` is called after compilation, as it times passes.
    """
    may_join_later = method in HIERARCHIES and not METHODS[method].trained
    if not may_join_later or not is_compiling(DRAFTER):
        wait_until_compiled(DRAFTER)
        return make()
    _loading()
    made = cache(make)
    return [DeferredDrafter(lambda place=place: made()[place]) for place in range(number)]  # type: ignore[misc]


@cache
def _loading() -> Thread:
    """Start and return a thread that loads the code once it is compiled, so that no step of an answer has to."""

    def load() -> None:
        wait_until_compiled(DRAFTER, shown=False)
        compile_hierarchy()

    thread = Thread(target=load, daemon=True)
    thread.start()
    return thread


class DeferredDrafter(WrappedDrafter):
    """Drafts nothing until the code of another drafter is loaded, then delegates to that drafter.

    A drafter that joins during an answer treats the tokens emitted so far as part of the prompt.
    """

    predicts = True

    def __init__(self, make: Callable[[], Drafter]) -> None:
        super().__init__(NoDraft())
        self._make: Callable[[], Drafter] | None = make
        """Makes the drafter; None once it has joined."""
        self._seed: int | None = None
        self._prompt_length = 0
        self._prediction: Sequence[int] = ()

    def _joins(self) -> bool:
        """Make the drafter if its code is loaded; return True if this call has made it."""
        if self._make is None or _loading().is_alive():
            return False
        self._drafter, self._make = self._make(), None
        super().set_seed(self._seed)
        return True

    @property
    def reads_logits(self) -> bool:
        return self._make is not None or super().reads_logits

    def set_seed(self, seed: int | None) -> None:
        self._seed = seed
        super().set_seed(seed)

    def begin(self, prompt: Sequence[int]) -> None:
        self._joins()
        self._prompt_length, self._prediction = len(prompt), ()
        super().begin(prompt)

    def predict(self, prediction: Sequence[int]) -> None:
        self._prediction = prediction
        super().predict(prediction)

    def draft(self, context: Sequence[int]) -> DraftTree:
        if self._joins():
            super().begin(context)
            if len(rest := self._prediction[len(context) - self._prompt_length :]):
                super().predict(rest)
        return super().draft(context)

    @property
    def joint(self) -> Hashable:
        return self if self._make else self._drafter.joint

    def draft_many(self, drafters: Sequence[DeferredDrafter], contexts: Sequence[Sequence[int]]) -> list[DraftTree]:
        return draft_many([drafter._drafter for drafter in drafters], contexts)
