"""What is measured against each other: our methods, and what the library itself offers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from hdtool.data.answered import AnsweredTurn
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.decode import Finish, Step, decode, room_for
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.generation import generate_options, refuse_settings
from hdtool.runtime.load import Loaded
from hdtool.runtime.stats import Stats
from hdtool.runtime.text import text_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


class Contender(Protocol):
    """Answers a prompt, and says what it took."""

    def answer(self, prompt: list[int]) -> AnsweredTurn: ...


class Drafting:
    """One of our methods."""

    def __init__(self, loaded: Loaded, drafter: Drafter, sampling: SamplingConfig, max_new_tokens: int) -> None:
        self._loaded = loaded
        self._drafter = drafter
        self._sampling = sampling
        self._most = max_new_tokens

    def answer(self, prompt: list[int]) -> AnsweredTurn:
        stats = Stats()
        counted = stats.counted(self._steps(prompt), self._drafter)
        steps, seconds = timed(self._loaded.target.device, lambda: list(counted))
        output_ids = [token for step in steps for token in step.tokens]
        return AnsweredTurn(
            text_of(self._loaded.tokenizer, output_ids),
            output_ids,
            [len(step.tokens) for step in steps],
            seconds,
            finish=str(steps[-1].finish),
            nodes=sum(len(step.tree) for step in steps),
            draft_seconds=stats.draft_seconds,
            model_seconds=stats.verify_seconds,
            drafted_by=[int(source) for step in steps for source in step.sources],
            sources=stats.told_sources(),
        )

    def _steps(self, prompt: list[int]) -> Iterator[Step]:
        target, most = self._loaded.target, self._most
        sampler, stops = self._loaded.sampler(self._sampling, prompt, max_new_tokens=most)
        return decode(target, prompt, sampler, max_new_tokens=most, stops=stops, drafter=self._drafter)


class Generating:
    """The library's ``generate`` with a model as its users load it: same ends, same length, same temperature.

    Greedy answers are those of plain decoding. Sampled ones are not: the library draws in its own way.
    """

    def __init__(
        self,
        loaded: Loaded,
        model: PreTrainedModel,
        sampling: SamplingConfig,
        max_new_tokens: int,
        **drafting: Any,
    ) -> None:
        """``drafting`` is what ``generate`` is told about drafts: nothing means that it makes none."""
        self._loaded = loaded
        self._model: Any = model
        self._seed = sampling.seed
        self._most = max_new_tokens
        self._drafting = drafting
        refuse_settings(model.generation_config)
        self._sampling = sampling

    def answer(self, prompt: list[int]) -> AnsweredTurn:
        room, at_the_end = room_for(self._loaded.target, prompt, self._most)
        torch.manual_seed(self._seed % 2**63)
        passes = _Passes(len(prompt))
        # A plain pass brings one token; who needs no counting goes without.
        with passes.counted(self._model, wanted=bool(self._drafting)):
            output_ids, seconds = timed(self._model.device, lambda: self._generate(prompt, room))
        ended = output_ids[-1] in self._loaded.stops
        return AnsweredTurn(
            text_of(self._loaded.tokenizer, output_ids),
            output_ids,
            passes.tokens(len(output_ids)) if self._drafting else [1] * len(output_ids),
            seconds,
            finish=str(Finish.STOP if ended else at_the_end),
            nodes=passes.drafted,
        )

    def _generate(self, prompt: list[int], room: int) -> list[int]:
        asked = torch.tensor([prompt], device=self._model.device)
        said = self._model.generate(
            asked,
            attention_mask=torch.ones_like(asked),
            **generate_options(self._sampling, self._model.generation_config, self._loaded.stops, room),
            **({"tokenizer": self._loaded.tokenizer} if self._model.generation_config.stop_strings else {})
            | self._drafting,
        )
        answer: list[int] = said[0, len(prompt) :].tolist()
        return answer


class _Passes:
    """What forward passes inside ``generate`` were given, from which follows what each of them brought."""

    def __init__(self, prompt_length: int) -> None:
        self._known = [prompt_length]
        """Tokens of the conversation at the start of each pass, and at last at the end."""
        self.drafted = 0
        self._first = True

    @contextmanager
    def counted(self, model: PreTrainedModel, *, wanted: bool) -> Iterator[None]:
        hook = model.register_forward_pre_hook(self._note, with_kwargs=True) if wanted else None
        try:
            yield
        finally:
            if hook:
                hook.remove()

    def tokens(self, answered: int) -> list[int]:
        """The tokens that each pass brought, of so many in all."""
        ends = [*self._known[1:], self._known[0] + answered]
        return [end - start for start, end in zip(self._known, ends, strict=True)]

    def _note(self, model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows = options["input_ids"].shape[1]
        if self._first:
            self._first = False
            self.drafted += rows - self._known[0]
        else:
            # The last token said is not in the cache yet: it is the first row of the pass.
            self._known.append(options["past_key_values"].get_seq_length() + 1)
            self.drafted += rows - 1


def timed(device: torch.device, action: Callable[[], T]) -> tuple[T, float]:
    """What an action gives, and its seconds, with all work of the device done before and after."""
    _settle(device)
    started = time.perf_counter()
    found = action()
    _settle(device)
    return found, time.perf_counter() - started


def _settle(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
