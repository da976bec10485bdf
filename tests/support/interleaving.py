"""Random interleavings of answers on one model: each must have the tokens that it has alone.

``play`` starts, advances, closes and abandons answers in random order. An answer is a stream, a batch, or a call of
``generate`` whose streamer advances the others. On engines that capture steps, those of streams and of full batches run
while other answers advance.
"""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from hdtool.data.errors import ModelError
from hdtool.runtime.budget.measure_passes import time_tree_passes
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of
from tests.support.families import VOCABULARY
from tests.support.oracle import generated, prompt_of
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

LENGTHS = 5, 20, 37
MAX_NEW_TOKENS, MAX_RUNNING, MAX_BATCH, NODES = 10, 4, 3, 8
SAMPLINGS = {
    "greedy": SamplingConfig(),
    "T 0.8": SamplingConfig(temperature=0.8, seed=5),
    "T 1, top-k 8": SamplingConfig(temperature=1.0, top_k=8, seed=6),
}
TAKEN_OVER = "another conversation began"

Key = tuple[int, str]
"""Length of the prompt and name of the sampling, which determine an answer."""
Emitted = list[tuple[int, list[int]]]
"""Places of answers in a batch, and the tokens that each has emitted."""
MoreDrafters = dict[str, Callable[[Target], Drafter]]


class Running:
    """One or several answers that are decoded together, and the tokens that they have emitted."""

    def __init__(self, name: str, expected: Sequence[list[int]], emitted: Iterator[Emitted]) -> None:
        self.name, self.is_taken_over = name, False
        self._expected, self._emitted = expected, emitted
        self._found: defaultdict[int, list[int]] = defaultdict(list)

    def advance(self) -> bool:
        """Compare the tokens of one more step with the expected ones; return False if all answers have ended."""
        try:
            emitted = next(self._emitted, None)
        except ModelError as error:
            assert self.is_taken_over and TAKEN_OVER in str(error), self.name
            return False
        assert emitted is None or not self.is_taken_over, f"{self.name} goes on in another conversation's cache"
        for place, tokens in emitted or []:
            self._found[place] += tokens
            found = self._found[place]
            assert found == self._expected[place][: len(found)], f"answer {place} of {self.name} differs from it alone"
        if emitted is None:
            assert [self._found[place] for place in range(len(self._expected))] == self._expected, self.name
        return emitted is not None


class Interleaving:
    """Plays random answers on one target."""

    def __init__(self, target: Target, drafters: MoreDrafters | None = None, *, in_threads: bool = True) -> None:
        """``drafters`` makes further drafters by name; with ``in_threads``, some steps run in threads of their own."""
        self.target, self.played = target, defaultdict[str, int](int)
        """``played`` counts what was played."""
        self._in_threads = in_threads
        self._generator = Generator(lambda target: Hierarchy(budget=FixedBudget(NODES), recycled=True))
        self._alone: dict[Key, list[int]] = {
            (length, name): answer_of(target, prompt_of(length), sampling, MAX_NEW_TOKENS)
            for length in LENGTHS
            for name, sampling in SAMPLINGS.items()
        }
        self._drafters: dict[str, Callable[[Key], Drafter]] = {
            "none": lambda key: NoDraft(),
            "wrong": lambda key: WrongDrafter(key[0], self._alone[key], VOCABULARY, self._random.randrange(99)),
            "hd": lambda key: Hierarchy(budget=FixedBudget(NODES), last=True, recycled=True),
            **{name: partial(self._made_by, make) for name, make in (drafters or {}).items()},
        }
        self._kinds = {"stream": self._stream, "batch": self._batch}
        self._whole = {"hook": self._hook, "generate": self._generate, "measurement": self._measure}
        self._running: list[Running] = []

    def _made_by(self, make: Callable[[Target], Drafter], key: Key) -> Drafter:
        return make(self.target)

    def play(self, seed: int, turns: int = 60) -> None:
        """Play this many turns, then finish all answers."""
        self._random, self._running = random.Random(seed), []
        for _ in range(turns):
            self._turn()
        while self._running:
            self._advance()

    def _turn(self) -> None:
        draw = self._random.random()
        if draw < 0.2 or not self._running:
            self._start()
        elif draw < 0.26:
            self._running.pop(self._random.randrange(len(self._running)))  # abandoned, which ends it
            gc.collect()
            self.played["abandoned"] += 1
        else:
            self._advance()

    def _start(self) -> None:
        if len(self._running) == MAX_RUNNING:
            return
        kind = self._random.choice([*self._kinds, *self._kinds, *self._whole])
        self.played[kind] += 1
        if whole := self._whole.get(kind):
            whole()
            return
        if kind == "stream":  # all streams of a target use its one cache
            for running in self._running:
                running.is_taken_over |= running.name.startswith("stream")
        size = 1 if kind == "stream" else self._random.randint(1, MAX_BATCH)
        keys = [self._random.choice(list(self._alone)) for _ in range(size)]
        name = self._random.choice(list(self._drafters))
        requests = [self._request(place, key, self._drafters[name](key)) for place, key in enumerate(keys)]
        emitted = self._kinds[kind](requests)
        running = Running(f"{kind} {keys} with {name}", [self._alone[key] for key in keys], emitted)
        if running.advance():
            self._running.append(running)

    def _request(self, place: int, key: Key, drafter: Drafter) -> Request[int]:
        prompt = prompt_of(key[0])
        return Request(place, prompt, sampler_of(SAMPLINGS[key[1]], prompt), drafter)

    def _advance(self) -> None:
        running = self._random.choice(self._running)
        in_thread = self._in_threads and self._random.random() < 0.3
        if not (_in_thread(running.advance) if in_thread else running.advance()):
            self._running.remove(running)

    def _stream(self, requests: Sequence[Request[int]]) -> Iterator[Emitted]:
        (only,) = requests
        steps = decode(self.target, only.prompt, only.sampler, drafter=only.drafter, max_new_tokens=MAX_NEW_TOKENS)
        for step in steps:
            yield [(0, step.tokens)]

    def _batch(self, requests: Sequence[Request[int]]) -> Iterator[Emitted]:
        waiting, size = iter(requests), self._random.randint(1, len(requests))
        for request, step in decode_batch(
            self.target, lambda: next(waiting, None), size, max_new_tokens=MAX_NEW_TOKENS
        ):
            yield [(request.key, step.tokens)]

    def _hook(self) -> None:
        length = self._random.choice(LENGTHS)
        options: dict[str, Any] = {"custom_generate": self._generator, "streamer": Streamer(self)}
        found = generated(self.target.model, prompt_of(length), MAX_NEW_TOKENS, **options)
        assert found == self._alone[length, "greedy"], "the hook's answer differs"

    def _generate(self) -> None:
        length = self._random.choice(LENGTHS)
        assert generated(self.target.model, prompt_of(length), MAX_NEW_TOKENS) == self._alone[length, "greedy"]

    def _measure(self) -> None:
        time_tree_passes(self.target, [0, 3], lambda *_: True, batch=self._random.randint(1, MAX_BATCH))

    def advance_any(self) -> None:
        if self._running and self._random.random() < 0.5:
            self._advance()


class Streamer:
    """Lets other answers advance between the tokens of an answer by ``generate``."""

    def __init__(self, interleaving: Interleaving) -> None:
        self._interleaving = interleaving

    def put(self, tokens: object) -> None:
        self._interleaving.advance_any()

    def end(self) -> None: ...


def _in_thread(advance: Callable[[], bool]) -> bool:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(advance).result()
