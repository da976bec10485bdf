"""Scores of a benchmark by task, computed as in Spec-Bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hdtool.builders.evaluation.timing import Timings, doubt
from hdtool.data.answered_questions import AnsweredQuestion
from hdtool.data.bench_results import Results
from hdtool.data.errors import OptionError
from hdtool.data.prompts import tasks_of
from hdtool.runtime.settings.decoding import METHODS, DecodeConfig
from hdtool.runtime.settings.measuring import PEERS
from hdtool.runtime.settings.model import SamplingConfig

ALL_TASKS = "overall"
PLAIN_METHOD = "ar"
DEFAULT_METHOD = DecodeConfig().method


@dataclass(frozen=True)
class Score:
    """Scores of one method on the questions of one task."""

    questions: int
    tokens_per_second: float
    """Mean over questions, not weighted by length."""
    tokens_per_cpu_second: float | None
    """Tokens per second of CPU time, of all threads; mean over questions. None if it was not recorded."""
    speedup: float
    """Ratio of tokens per second to the baseline's."""
    tokens_per_step: float
    """Mean over all steps of all questions."""
    identical: int | None
    """Number of questions answered with the reference's tokens in all turns; None if not comparable."""
    nodes_per_step: float
    draft_us_per_step: float | None
    """Microseconds of drafting; None for peers, which do not report drafting time."""
    model_ms_per_step: float | None


@dataclass(frozen=True)
class Scores:
    """Scores of all methods by task; the last task covers all questions."""

    baseline: str
    reference: str | None
    """Method whose answers all other answers are compared with; None if no such method was measured."""
    tasks: dict[str, dict[str, Score]]
    doubt: str = ""
    """Sentence on why the measured times cannot be compared; empty if they can."""

    @property
    def comparisons(self) -> tuple[str, ...]:
        """Reference methods for speedups: plain decoding, which shows the gain from drafting, then the baseline.

        Empty if the measured times cannot be compared.
        """
        if self.doubt:
            return ()
        return tuple(dict.fromkeys(name for name in (PLAIN_METHOD, self.baseline) if name in self.tasks[ALL_TASKS]))

    def speedup(self, task: str, method: str, reference: str) -> float:
        """Return the tokens per second of ``method`` divided by those of ``reference``."""
        scores = self.tasks[task]
        return scores[method].tokens_per_second / scores[reference].tokens_per_second

    @property
    def headline_method(self) -> str:
        """The default method or, if it was not measured, the fastest method, preferably one of hdtool's that drafts."""
        whole = self.tasks[ALL_TASKS]
        drafting = [name for name in whole if name in METHODS and name != PLAIN_METHOD] or list(whole)
        fastest = max(drafting, key=lambda name: whole[name].tokens_per_second)
        return DEFAULT_METHOD if DEFAULT_METHOD in whole else fastest

    def headline(self) -> str:
        """Return a sentence on the speed of ``headline_method``.

        If the measured times cannot be compared, return the sentence that says why.
        """
        if self.doubt:
            return self.doubt
        whole, method = self.tasks[ALL_TASKS], self.headline_method
        sentences = [f"{method} answers {whole[method].tokens_per_second:,.1f} tokens/s"]
        if PLAIN_METHOD in whole and method != PLAIN_METHOD:
            gain = self.speedup(ALL_TASKS, method, PLAIN_METHOD)
            sentences = [f"{method} answers {gain:.2f} times as fast as {method_in_words(PLAIN_METHOD)}"]
            sentences[0] += "" if gain > 1 else ": drafting does not pay here"
        if self.baseline not in (method, PLAIN_METHOD):
            alone = (
                f"plain decoding alone {self.speedup(ALL_TASKS, PLAIN_METHOD, self.baseline):.2f}"
                if PLAIN_METHOD in whole
                else ""
            )
            unknown = f"without {PLAIN_METHOD} among the methods, what drafting brings is not known"
            gain = self.speedup(ALL_TASKS, method, self.baseline)
            sentences.append(f"Against {self.baseline} it is {gain:.2f} times as fast; {alone or unknown}")
        return ". ".join(sentences) + "."

    def to_json(self) -> dict[str, Any]:
        """Return the ``--json`` output, whose keys are stable."""
        return {
            "baseline": self.baseline,
            "reference": self.reference,
            "doubt": self.doubt or None,
            "tasks": {
                task: {method: _rounded(score) for method, score in scores.items()}
                for task, scores in self.tasks.items()
            },
        }


def scores_of(results: Results, baseline: str | None = None) -> Scores:
    """Score all questions that every method has answered; there must be at least one."""
    methods = results.run.methods
    against = baseline_of(methods, baseline)
    greedy = SamplingConfig(temperature=results.run.options["temperature"]).is_greedy
    reference = next((name for name in ("ar", "generate")[: 1 + greedy] if name in methods), None)
    tasks = {}
    for task, places in _indices_by_task(results.answers[methods[0]]).items():
        answers = {method: [rows[place] for place in places] for method, rows in results.answers.items()}
        reference_answers = answers[reference] if reference else None
        speed = mean_speed(answers[against])
        tasks[task] = {
            method: _score(rows, speed, reference_answers if greedy or method not in PEERS else None)
            for method, rows in answers.items()
        }
    return Scores(against, reference, tasks, doubt(timings_of(results.answers)))


def timings_of(answers: Mapping[str, Sequence[AnsweredQuestion]]) -> dict[str, Timings]:
    """Return the timings of each method's answers."""
    return {
        method: Timings.of(
            (turn for answer in rows for turn in answer.turns),
            [[sum(seconds) for seconds in answer.seconds_rounds] for answer in rows],
        )
        for method, rows in answers.items()
    }


def baseline_of(methods: Sequence[str], requested: str | None = None) -> str:
    """Return the baseline: ``requested``, which must be among ``methods``, or else ``generate`` or the first method."""
    if requested is None:
        return "generate" if "generate" in methods else methods[0]
    if requested not in methods:
        raise OptionError(f"baseline is {requested}, which is not measured here: name one of {', '.join(methods)}")
    return requested


def _indices_by_task(questions: Sequence[AnsweredQuestion]) -> dict[str, list[int]]:
    """Map each task, if there are several, to the indices of its questions, and ``ALL_TASKS`` to all indices."""
    tasks: dict[str, list[int]] = {}
    for place, task in enumerate(tasks_of([question.category for question in questions])):
        tasks.setdefault(task, []).append(place)
    tasks.pop("", None)
    return (tasks if len(tasks) > 1 else {}) | {ALL_TASKS: list(range(len(questions)))}


def method_in_words(method: str) -> str:
    """Return the name of a reference method for use in a sentence."""
    return f"plain decoding on the same engine ({PLAIN_METHOD})" if method == PLAIN_METHOD else method


def mean_speed(answers: Sequence[AnsweredQuestion]) -> float:
    """Return tokens per second, averaged over questions."""
    return fmean(answer.tokens_per_second for answer in answers)


def _speed_by_cpu(answers: Sequence[AnsweredQuestion]) -> float | None:
    """Return tokens per second of CPU time, averaged over questions; None if it was not recorded."""
    seconds = [sum(turn.cpu_seconds or 0.0 for turn in answer.turns) for answer in answers]
    return (
        fmean(sum(answer.new_tokens) / cpu for answer, cpu in zip(answers, seconds, strict=True))
        if all(seconds)
        else None
    )


def _score(answers: Sequence[AnsweredQuestion], baseline: float, reference: Sequence[AnsweredQuestion] | None) -> Score:
    turns = [turn for answer in answers for turn in answer.turns]
    steps = [tokens for turn in turns for tokens in turn.step_tokens]
    drafting, in_model = (
        [seconds for turn in turns if (seconds := getattr(turn, name)) is not None]
        for name in ("draft_seconds", "model_seconds")
    )
    return Score(
        questions=len(answers),
        tokens_per_second=mean_speed(answers),
        tokens_per_cpu_second=_speed_by_cpu(answers),
        speedup=mean_speed(answers) / baseline,
        tokens_per_step=fmean(steps),
        identical=None
        if reference is None
        else sum(one.output_ids == expected.output_ids for one, expected in zip(answers, reference, strict=True)),
        nodes_per_step=sum(turn.nodes for turn in turns) / len(steps),
        draft_us_per_step=sum(drafting) / len(steps) * 1e6 if drafting else None,
        model_ms_per_step=sum(in_model) / len(steps) * 1e3 if in_model else None,
    )


def _rounded(score: Score) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(score).items()}
