"""Verdict of a set-up: whether drafting pays on this device, which sources help, and the command to run next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hdtool.builders.setup.advice import advice, source_gains
from hdtool.data.progress import count_of
from hdtool.runtime.settings.model import SamplingConfig

HD_METHOD = "hd"
MIN_SPEEDUP = 1.05
"""Minimum speedup over plain decoding at which drafting pays; a smaller speedup may be measurement noise."""
RELIABLE_ANSWERS = 12
"""Number of measured answers below which the verdict may not be representative."""


def doubted(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """Return why the times that these stages measured cannot be compared; empty if they can."""
    reasons = (str(stages.get(name, {}).get("doubt", "")) for name in ("passes", "answers"))
    return next((reason for reason in reasons if reason), "")


@dataclass(frozen=True)
class Verdict:
    """Conclusion from the results of all stages."""

    model: str
    stages: Mapping[str, Mapping[str, Any]]
    options: tuple[str, ...]
    """Options of model and sampling as the user typed them, for the next command."""
    sampling: SamplingConfig
    """How the measured answers were sampled."""

    @property
    def doubt(self) -> str:
        """Sentence on why the measured times cannot be compared; empty if they can."""
        return doubted(self.stages)

    @property
    def expected(self) -> float:
        """Predicted speedup over plain decoding."""
        replayed = self.stages["replay"]
        return float(replayed["tokens_per_second"] / replayed["plain_tokens_per_second"])

    @property
    def method(self) -> str:
        """Fastest measured method: ``hd`` or, if trained drafters are available, a method that uses one.

        It is ``hd`` if the measured times cannot be compared.
        """
        speeds = self.stages["answers"]["tokens_per_second"]
        candidates = [HD_METHOD] if self.doubt else [HD_METHOD, *self._offered]
        return max(candidates, key=lambda name: float(speeds[name]))

    @property
    def _offered(self) -> Mapping[str, Mapping[str, Any]]:
        """Results of the methods with a trained drafter, by name."""
        offered: Mapping[str, Mapping[str, Any]] = self.stages["answers"].get("offered", {})
        return offered

    @property
    def measured(self) -> float:
        """Measured speedup of the fastest method over plain decoding."""
        speeds = self.stages["answers"]["tokens_per_second"]
        return float(speeds[self.method] / speeds["ar"])

    @property
    def lossless(self) -> bool:
        answers = self.stages["answers"]
        return bool(answers["identical"] + answers["near_ties"] == answers["prompts"])

    @property
    def pays(self) -> bool | None:
        """Whether drafting pays: False if it is not lossless, and None if the measured times cannot be compared."""
        if not self.lossless:
            return False
        return None if self.doubt else self.measured >= MIN_SPEEDUP

    @property
    def next_command(self) -> str:
        """Command to run next. It does not name the stores in hdtool's home, which are found by default."""
        method: Sequence[str] = ("--method", "ar") if self.pays is False else ()
        if self.pays and self.method != HD_METHOD:
            method = self._offered[self.method]["options"]
        return self._command("generate", *method) + ' "..."'

    def _command(self, name: str, *more: str) -> str:
        return shlex.join(["hdtool", name, self.model, *self.options, *more])

    @property
    def advice(self) -> list[str]:
        """Sentences on what to do besides running ``next_command``; empty if the method is not lossless."""
        return advice(self.stages, MIN_SPEEDUP / self.measured if self.pays is False else None) if self.lossless else []

    def lines(self) -> list[str]:
        """Return the figures, verdict, advice and next command as lines of text."""
        replayed, answers = self.stages["replay"], self.stages["answers"]
        speeds = answers["tokens_per_second"]
        sampled = "" if self.sampling.is_greedy else f" at temperature {self.sampling.temperature:g}"
        return [
            f"expected  {replayed['tokens_per_second']:.1f} tokens/s with hd, "
            f"{replayed['plain_tokens_per_second']:.1f} without drafts{self._times(self.expected)}, "
            f"by replay of {count_of(self.stages['read']['held_out'], 'held-out conversation')}",
            f"measured  {speeds['hd']:.1f} tokens/s with hd{sampled}, {speeds['ar']:.1f} without drafts"
            f"{self._times(speeds['hd'] / speeds['ar'])}; {speeds['generate']:.1f} by transformers' generate; "
            f"{self._identical()}",
            *(
                f"drafter   {speeds[name]:.1f} tokens/s with {name}{self._times(speeds[name] / speeds['ar'])}, "
                f"{measured['tokens_per_step']:.2f} tokens per step"
                for name, measured in self._offered.items()
            ),
            f"sources   {self._sources()}",
            f"verdict   {self._judged()}",
            *(f"advice    {sentence}" for sentence in self.advice),
            f"next      {self.next_command}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the ``--json`` output, whose keys are stable."""
        read, passes, replayed, answers = (self.stages[name] for name in ("read", "passes", "replay", "answers"))
        stores = {name: self.stages[name] for name in ("model_store", "corpus_index") if name in self.stages}
        return {
            "model": self.model,
            **{name: passes[name] for name in ("device", "dtype", "threads")},
            **{name: read[name] for name in ("conversations", "held_out")},
            "stores": stores,
            "sampling": {
                name: getattr(self.sampling, name)
                for name in ("temperature", "top_k", "top_p", "repetition_penalty", "seed")
            },
            "expected": _speeds(replayed["plain_tokens_per_second"], replayed["tokens_per_second"]),
            "measured": {
                **_speeds(answers["tokens_per_second"]["ar"], answers["tokens_per_second"]["hd"]),
                "generate_tokens_per_second": round(answers["tokens_per_second"]["generate"], 2),
                **{name: answers[name] for name in ("prompts", "identical", "near_ties")},
                "tokens_per_step": round(answers["tokens_per_step"], 3),
            },
            "method": self.method,
            "drafters": {
                name: {
                    "tokens_per_second": round(answers["tokens_per_second"][name], 2),
                    "tokens_per_step": round(measured["tokens_per_step"], 3),
                }
                for name, measured in self._offered.items()
            },
            "tokens_per_step": replayed["tokens_per_step"],
            "accepted": replayed["accepted"],
            "lossless": self.lossless,
            "doubt": self.doubt or None,
            "pays": self.pays,
            "reason": self._judged(),
            "advice": self.advice,
            "next": self.next_command,
        }

    def _times(self, speedup: float) -> str:
        """Return ``speedup`` as a phrase that follows the two speeds; an empty string if the times are in doubt."""
        return "" if self.doubt else f": {speedup:.2f} times"

    def _identical(self) -> str:
        answers = self.stages["answers"]
        verb = "differs" if answers["near_ties"] == 1 else "differ"
        ties = f", {answers['near_ties']} {verb} at near ties" if answers["near_ties"] else ""
        return f"{answers['identical']} of {count_of(answers['prompts'], 'answer')} identical{ties}"

    def _sources(self) -> str:
        """Return a phrase that states the tokens per step after each added source."""
        first, *others = self.stages["replay"]["tokens_per_step"].items()
        words = [f"{first[1]:.2f} tokens per step from the conversation alone"]
        gained = source_gains(self.stages["replay"]["tokens_per_step"])
        words += [
            f"{value:.2f} with {SOURCE_LABELS[name]} ({round(gained[name] - 1, 2) + 0.0:+.0%})"
            for name, value in others
        ]
        return ", ".join(words)

    def _judged(self) -> str:
        if not self.lossless:
            return f"NOT lossless: run {self._command('verify')} and report what it prints"
        return f"{self.doubt.removesuffix('.')}, with the same command." if self.doubt else self._paying() + self._few()

    def _few(self) -> str:
        prompts = self.stages["answers"]["prompts"]
        if prompts >= RELIABLE_ANSWERS or self.pays == (self.expected >= MIN_SPEEDUP) or not self.sampling.is_greedy:
            return ""
        few = "1 answer is" if prompts == 1 else f"{prompts} answers are"
        return f"; the prediction differs, and {few} few: try --num-prompts {RELIABLE_ANSWERS}"

    def _paying(self) -> str:
        if self.pays:
            with_method = f" with {self.method}" if self._offered else ""
            same = "with the same answers"
            if self.stages["answers"]["near_ties"]:
                same = "with answers that differ at near ties only"
            return f"drafting pays: {self.measured:.2f} times as fast{with_method}, {same}"
        steps, nodes = self.stages["answers"]["tokens_per_step"], self.stages["replay"]["draft_tokens_per_step"]
        return (
            f"drafting does not pay here: a step yields {steps:.2f} tokens, and its {nodes:.1f} draft tokens and their "
            "look-ups take as long as they save; more logs, or a device with more cores, may change that"
        )


SOURCE_LABELS = {
    "model": "the model store",
    "corpus": "the corpus index",
    "history": "the history of a running process",
}


def _speeds(plain: float, drafted: float) -> dict[str, float]:
    return {
        "plain_tokens_per_second": round(plain, 2),
        "tokens_per_second": round(drafted, 2),
        "speedup": round(drafted / plain, 3),
    }
