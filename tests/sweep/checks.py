"""Decode with a tiny model of one type in every way, and compare the answers with ``generate`` of transformers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from hdtool.data.errors import FamilyError, HdtoolError, error_reason
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, answer_of, answers_of, output_tokens, request, run
from tests.support.families import VOCABULARY, saved as save
from tests.support.oracle import generated, plain_logits, prompt_of
from tests.support.trees import WrongDrafter
from tests.sweep.models import NotBuiltError, small_config, tiny_model
from tests.sweep.result import CHAINS, FAILS, NOT_BUILT, OTHER, REFUSED, SAME, TREES, WRONG, Result
from tests.sweep.special import OTHERS
from tests.sweep.types import auto_class

GREEDY = SamplingConfig()
SHORT, LONG = prompt_of(45), prompt_of(150)
"""Prompts. The second one is longer than every window of a tiny model."""
BATCH = prompt_of(12), SHORT, prompt_of(80)
MAX_NEW_TOKENS, FEWER_TOKENS = 40, 24
"""Maximum number of tokens of an answer."""
NEAR_TIE = 1e-3
"""Gap between two logits, in standard deviations, below which float32 rounding may decide."""


def check(kind: str, *, captures: bool = False) -> Result:
    """Run all checks of one type. Never raises."""
    result, begun = Result(kind), time.monotonic()
    try:
        _Checks(result, captures=captures).run()
    except NotBuiltError as error:
        result.verdict, result.reason = NOT_BUILT, str(error)
    except Exception as error:
        result.verdict, result.reason = WRONG, f"crashes: {short(error)}"
    result.seconds = round(time.monotonic() - begun, 1)
    return result


def short(error: Exception) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(error_reason(error).split())[:160]}"


class _Checks:
    def __init__(self, result: Result, *, captures: bool) -> None:
        self._result, self._captures = result, captures

    def run(self) -> None:
        model = self._built()
        if model is None or not self._asked(model):
            return
        result = self._result
        try:
            target = Target(model)
        except FamilyError as error:
            result.reason = reason_of_refusal(error)
            self._refused_elsewhere(model)
            result.verdict = REFUSED if set(result.checks.values()) <= {SAME} else WRONG
            return
        self._decoded(target)
        self._loaded(model)
        if self._captures:
            self._captured(model)
        wrong = [name for name, found in result.checks.items() if found != SAME]
        result.verdict = WRONG if wrong else TREES if target.takes_trees else CHAINS

    def _built(self) -> Any:
        """Return the tiny model, or None if the type is not a decoder."""
        result = self._result
        if result.kind in OTHERS:
            result.verdict, result.reason = OTHER, OTHERS[result.kind]
            return None
        try:
            config = small_config(result.kind)
            if config.is_encoder_decoder:
                result.verdict, result.reason = OTHER, "an encoder-decoder"
                return None
            model = tiny_model(result.kind)
        except NotBuiltError:
            raise
        except Exception as error:
            raise NotBuiltError(short(error)) from error
        return model

    def _asked(self, model: Any) -> bool:
        """Return True if transformers generates an answer, and note how consistent its answers are."""
        result = self._result
        try:
            self._short, self._long = generated(model, SHORT, MAX_NEW_TOKENS), generated(model, LONG, MAX_NEW_TOKENS)
        except Exception as error:
            result.verdict, result.reason = FAILS, short(error)
            self._refused(model)
            return False
        if generated(model, SHORT, FEWER_TOKENS) != self._short[:FEWER_TOKENS]:
            result.notes.append("generate is not deterministic")
        if len(set(self._short)) < 4:
            result.notes.append(f"dull: {len(set(self._short))} different tokens")
        for name, prompt, answer in (("", SHORT, self._short), (" on a long prompt", LONG, self._long)):
            try:
                if generated(model, prompt, 12, use_cache=False) != answer[:12]:
                    result.notes.append(f"generate answers otherwise without its cache{name}")
            except Exception as error:
                result.notes.append(f"generate fails without its cache: {short(error)}")
                break
        self._looked_up(model)
        return True

    def _refused(self, model: Any) -> None:
        """Note how hdtool refuses a model with which transformers cannot answer."""
        try:
            Target(model)
        except HdtoolError as error:
            self._result.notes.append(f"hdtool: {reason_of_refusal(error)}")
        except Exception as error:
            self._result.checks["object"] = f"fails: {short(error)}"

    def _refused_elsewhere(self, model: Any) -> None:
        """Check that the generate hook and loading from a folder refuse the model with an error of hdtool too."""
        wrong_drafter = WrongDrafter(len(SHORT), self._short, VOCABULARY, 4)
        with saved(model) as folder:
            ways: dict[str, Callable[[], object]] = {
                "hook": lambda: generated(model, SHORT, 4, custom_generate=Generator(wrong_drafter)),
                "load": lambda: load(ModelConfig(str(folder), dtype="float32")),
            }
            for name, answered in ways.items():
                try:
                    answered()
                except HdtoolError:
                    self._result.checks[name] = SAME
                except Exception as error:
                    self._result.checks[name] = f"fails: {short(error)}"
                else:
                    self._result.checks[name] = "not refused"

    def _looked_up(self, model: Any) -> None:
        """Compare prompt lookup of transformers with its plain decoding."""
        try:
            found = generated(model, SHORT, FEWER_TOKENS, prompt_lookup_num_tokens=4)
            self._result.lookup = SAME if found == self._short[:FEWER_TOKENS] else "other tokens"
        except Exception as error:
            self._result.lookup = f"fails: {short(error)}"

    def _decoded(self, target: Target) -> None:
        model, same = target.model, self._same
        for name, prompt, truth in (("", SHORT, self._short), (", long prompt", LONG, self._long)):
            same(f"plain{name}", prompt, truth, partial(_answer, target, prompt))
            for seed, known in ((1, truth), (2, truth), (3, [])):
                wrong_drafter = WrongDrafter(len(prompt), known, VOCABULARY, seed)
                same(f"drafted{name} ({seed})", prompt, truth, partial(_answer, target, prompt, drafter=wrong_drafter))
        self._second_turn(target)
        self._batch(target)
        self._sampled(target)
        wrong_drafter = WrongDrafter(len(SHORT), self._short, VOCABULARY, 4)
        same(
            "hook",
            SHORT,
            self._short,
            lambda: generated(model, SHORT, MAX_NEW_TOKENS, custom_generate=Generator(wrong_drafter)),
        )

    def _second_turn(self, target: Target) -> None:
        prompt = [*SHORT, *self._short[:FEWER_TOKENS], *prompt_of(9)]
        truth = generated(target.model, prompt, FEWER_TOKENS)

        def answered() -> list[int]:
            run(target, SHORT, GREEDY, FEWER_TOKENS, drafter=WrongDrafter(len(SHORT), self._short, VOCABULARY, 5))
            steps = run(target, prompt, GREEDY, FEWER_TOKENS, drafter=WrongDrafter(len(prompt), truth, VOCABULARY, 6))
            if not steps[0].cached_tokens:
                self._result.notes.append("a second turn reads all again")
            return output_tokens(steps)

        self._same("second turn", prompt, truth, answered)

    def _batch(self, target: Target) -> None:
        truths = [
            self._short[:FEWER_TOKENS] if one is SHORT else generated(target.model, one, FEWER_TOKENS) for one in BATCH
        ]

        requests = [
            request(slot, prompt, WrongDrafter(len(prompt), truth, VOCABULARY, 7 + slot))
            for slot, (prompt, truth) in enumerate(zip(BATCH, truths, strict=True))
        ]
        answers = self._tried("batch", lambda: answers_of(target, requests, 3, FEWER_TOKENS))
        if answers is not None:
            for slot, (prompt, truth) in enumerate(zip(BATCH, truths, strict=True)):
                if self._result.checks.get("batch", SAME) == SAME:
                    self._compare("batch", prompt, truth, answers[slot])

    def _sampled(self, target: Target) -> None:
        for name in ("T 0.7", "T 1, top-p 0.9"):
            sampled = partial(answer_of, target, SHORT, SAMPLINGS[name], FEWER_TOKENS)
            plain = self._tried("sampled", sampled)
            if plain is not None:
                wrong_drafter = WrongDrafter(len(SHORT), plain, VOCABULARY, 8)
                found = self._tried("sampled", partial(sampled, drafter=wrong_drafter))
                if found is not None:
                    self._result.checks["sampled"] = SAME if found == plain else f"other tokens at {name}"

    def _loaded(self, model: Any) -> None:
        """Check loading from a folder, as the command line does it."""
        with saved(model) as folder:

            def answered() -> list[int]:
                target = load(ModelConfig(str(folder), dtype="float32")).target
                self._result.compiled = target.compiled is not None
                wrong_drafter = WrongDrafter(len(SHORT), self._short, VOCABULARY, 9)
                return answer_of(target, SHORT, GREEDY, MAX_NEW_TOKENS, drafter=wrong_drafter)

            self._same("load", SHORT, self._short, answered)
            if self._result.checks["load"] != SAME and not self._reloads(folder):
                del self._result.checks["load"]
                self._result.notes.append("the library does not load what it saved")
        has_windows = getattr(model.config.get_text_config(decoder=True), "sliding_window", None)
        if has_windows and not self._result.compiled:
            self._result.compiled = self._compiled_without_windows()

    def _compiled_without_windows(self) -> bool:
        """Return True if hdtool compiles a model of the type without sliding windows, which many checkpoints lack."""
        try:
            with saved(tiny_model(self._result.kind, windows=False)) as folder:
                return load(ModelConfig(str(folder), dtype="float32")).target.compiled is not None
        except Exception:  # the type has no model without windows
            return False

    def _reloads(self, folder: Path) -> bool:
        """Return True if transformers gives the same answer after saving and loading."""
        try:
            return bool(
                generated(auto_class(self._result.kind).from_pretrained(folder), SHORT, MAX_NEW_TOKENS) == self._short
            )
        except Exception:
            return False

    def _captured(self, model: Any) -> None:
        """Check on a simulated CUDA device, without Triton. Nothing else can run in this process afterwards."""
        from tests.support.simulated_cuda.install import install, on_device

        sys.modules["hdtool.runtime.engines.cuda.triton_operations"] = None  # type: ignore[assignment]
        install()
        try:
            target = Target(on_device(model))
            if target.captures:
                self._result.captured = "hdtool" if target.is_fused else "transformers"
            wrong_drafter = WrongDrafter(len(SHORT), self._short, VOCABULARY, 10)
            found = answer_of(target, SHORT, GREEDY, FEWER_TOKENS, drafter=wrong_drafter)
        except Exception as error:  # the simulated device lacks some operations
            self._result.captured = ""
            self._result.notes.append(f"not simulated: {short(error)}")
        else:
            self._compare("captured", SHORT, self._short[:FEWER_TOKENS], found)

    def _same(self, name: str, prompt: list[int], truth: list[int], answered: Callable[[], list[int]]) -> None:
        found = self._tried(name, answered)
        if found is not None:
            self._compare(name, prompt, truth, found)

    def _tried(self, name: str, answered: Callable[[], Any]) -> Any:
        try:
            return answered()
        except HdtoolError as error:
            self._result.checks[name] = f"refused: {reason_of_refusal(error)}"
        except Exception as error:
            self._result.checks[name] = f"fails: {short(error)}"
        return None

    def _compare(self, name: str, prompt: list[int], truth: list[int], found: list[int]) -> None:
        self._result.checks[name] = SAME if found == truth else difference(self._model_of, prompt, truth, found)

    def _model_of(self) -> Any:
        return tiny_model(self._result.kind)


_answer = partial(answer_of, max_new_tokens=MAX_NEW_TOKENS)


def difference(made: Callable[[], Any], prompt: list[int], truth: list[int], found: list[int]) -> str:
    """Describe where two answers differ, and the gap between the two tokens' logits in a pass without a cache."""
    if len(found) < len(truth) and found == truth[: len(found)]:
        return f"ends after {len(found)} tokens"
    place = next(place for place, pair in enumerate(zip(truth, found, strict=False)) if pair[0] != pair[1])
    try:
        logits = plain_logits(made(), prompt + truth[:place]).float()
        gap = float((logits[truth[place]] - logits[found[place]]) / logits.std())
    except Exception:
        return f"token {place} is another one"
    return f"token {place} is another one, {gap:.2g} sigma less likely" + (" (a near tie)" * (abs(gap) < NEAR_TIE))


def reason_of_refusal(error: Exception) -> str:
    """Return the reason in an error message, without the model's type."""
    text = " ".join(str(error).split())
    return text.partition("cannot be used: ")[2] or text


@contextmanager
def saved(model: Any) -> Iterator[Path]:
    """Save a model with a tokenizer in a temporary folder."""
    with TemporaryDirectory(prefix="hdtool-sweep-") as name:
        yield save(model, Path(name))


def warm_up() -> None:
    """Import and compile what every type needs before forking this process."""
    torch.set_num_threads(1)
    model = tiny_model("llama")
    target = Target(model)
    run(target, SHORT[:5], GREEDY, 4, drafter=WrongDrafter(5, [], VOCABULARY, 0))
