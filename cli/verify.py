"""``hdtool verify``: check that drafting is lossless for a model, its stores and a device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries, with_structure
from hdtool.cli.options_from_settings import only, without
from hdtool.data import demo
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.settings.decoding import DecodeConfig, GrammarConfig, StoresConfig, VerifyConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.settings.settings_base import Panel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.builders.evaluation.verify import Check, Explanation, Measure, Oracle, Verifier
    from hdtool.runtime.target.load import Loaded

ORACLE_CLAIMS = {
    "plain": "drafted answers identical to plain decoding",
    "generate": "plain decoding identical to generate",
}


def verify(
    *,
    prompts: Annotated[
        Path | None, Option(Panel.INPUT, "File of prompts, as generate takes it. Default: the embedded prompts.")
    ] = None,
    size: Annotated[VerifyConfig, only("num_prompts")],
    chat: options.Chat = None,
    decoding: Annotated[
        DecodeConfig,
        without(
            "sources", "order", "lookahead", "batch_size", "prefix_caching", max_new_tokens=VerifyConfig.max_new_tokens
        ),
    ],
    stores: Annotated[StoresConfig, without("namespace")],
    sampling: Annotated[SamplingConfig, without("stop")],
    structure: GrammarConfig,
    tools: options.Tools = None,
    loading: Annotated[ModelConfig, without("device_map").as_argument()],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> int:
    """Check on your device that drafting changes no answer.

    Answers prompts by plain decoding, by the method and, with greedy decoding, by transformers' generate, and compares
    them token for token. At a difference, the logits are computed again in higher precision: a gap within the rounding
    error there is a near tie. A history store is read and not written. Exit code 0 if all answers are identical or
    differ at near ties only, else 1.
    """
    questions = with_structure(read_prompts(prompts or demo.PROMPTS)[: size.limit], structure, tools)
    from hdtool.builders.evaluation.verify import Verifier
    from hdtool.cli.answer_output import print_stores
    from hdtool.runtime.drafters.drafter_factory import compile_ahead, drafter_for, finish_compiling
    from hdtool.runtime.target.cpu_threads import choose_threads
    from hdtool.runtime.target.load import load

    quiet_libraries(quiet=quiet)
    compile_ahead(loading, decoding.method)
    loaded = load(loading)
    finish_compiling()
    choose_threads(loaded.target, loading.threads)
    # The answers of a check must not enter the user's history.
    store_set = loaded.store_opener(stores).open_for(decoding, read_only=True)
    drafter = drafter_for(decoding, loaded.target, store_set)
    verifier = Verifier(loaded, sampling, drafter, decoding.max_new_tokens, decoding.draft_tokens)
    print_stores(store_set)
    checks = _run_checks(verifier, loaded, questions, chat)
    explained = verifier.explain([difference for check in checks for difference in check.differences])
    report = _report(loaded, decoding.method, verifier.oracles, checks, explained)
    print(json.dumps(report, ensure_ascii=False) if as_json else _report_in_words(report))
    return 0 if report["lossless"] else 1


def _run_checks(verifier: Verifier, loaded: Loaded, questions: list[Prompt], chat: bool | None) -> list[Check]:
    from hdtool.data.chat import encode_answer, encode_conversation
    from hdtool.data.progress import with_progress

    checks = []
    for prompt in with_progress(questions, "prompts"):
        try:
            ids = encode_conversation(loaded.tokenizer, prompt.messages, chat=chat, tools=prompt.tools)
            prediction = encode_answer(loaded.tokenizer, prompt.messages, prompt.prediction, chat=chat)
            checks.append(verifier.check(prompt.id, ids, prompt.grammar, prediction))
        except PromptError as error:
            raise PromptError(f"prompt {prompt.id}: {error}") from None
    return checks


def _report(
    loaded: Loaded, method: str, oracles: list[Oracle], checks: list[Check], explained: list[Explanation]
) -> dict[str, Any]:
    """Return the ``--json`` record of ``verify``."""
    steps, tokens = (sum(getattr(check, name) for check in checks) for name in ("steps", "tokens"))
    return {
        "model": loaded.name,
        "device": str(loaded.target.device),
        "dtype": str(loaded.target.dtype).removeprefix("torch."),
        "method": method,
        "prompts": len(checks),
        "tokens": tokens,
        "tokens_per_step": round(tokens / steps, 3),
        "identical": {oracle: sum(check.equals(oracle) for check in checks) for oracle in oracles},
        "near_ties": sum(explanation.near_tie for explanation in explained),
        "lossless": all(explanation.near_tie for explanation in explained),
        "differences": [_difference(explanation, loaded.tokenizer) for explanation in explained],
    }


def _difference(explanation: Explanation, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    difference = explanation.difference

    def measure(taken: Measure | None) -> dict[str, Any] | None:
        return vars(taken) if taken else None

    def token(number: int | None) -> dict[str, Any] | None:
        return None if number is None else {"id": number, "text": tokenizer.decode([number])}

    return {
        "prompt": difference.prompt,
        "compared_with": difference.oracle,
        "position": difference.position,
        "expected": token(difference.expected),
        "found": token(difference.actual),
        "logits": measure(explanation.working),
        "recomputed": measure(explanation.precise),
        "recomputed_choice": token(explanation.chosen),
        "rounding": explanation.rounding,
        "near_tie": explanation.near_tie,
        "reason": explanation.reason,
    }


def _report_in_words(report: dict[str, Any]) -> str:
    lines = ["{model} on {device} in {dtype}, method {method}: {prompts} prompts, {tokens:,} tokens".format(**report)]
    lines += [
        f"{ORACLE_CLAIMS[oracle]}: {count} of {report['prompts']}" for oracle, count in report["identical"].items()
    ]
    lines += map(_location, report["differences"])
    advice = ": compare with --dtype float32" if report["dtype"] in ("bfloat16", "float16") else ""
    if not report["differences"]:
        lines.append(f"lossless, at {report['tokens_per_step']:.2f} tokens per step")
    elif report["lossless"]:
        lines.append(f"lossless except for {report['near_ties']} near ties that rounding decides{advice}")
    else:
        lines.append("NOT lossless: there are differences that rounding does not explain; please report this")
    return "\n".join(lines)


def _location(difference: dict[str, Any]) -> str:
    tokens = [difference[side] for side in ("expected", "found", "recomputed_choice")]
    expected, actual, chosen = (f"{token['id']} {token['text']!r}" if token else "the end" for token in tokens)
    lines = [
        f"prompt {difference['prompt']}, token {difference['position']}, compared with {difference['compared_with']}: "
        f"expected {expected}, found {actual}"
    ]
    for name in ("logits", "recomputed"):
        if taken := difference[name]:
            values = f"{taken['expected']:.6g} and {taken['found']:.6g}, {taken['gap']:.3g} apart when compared"
            lines.append(f"  {name} in {taken['dtype']}: {values}")
    if difference["rounding"] is not None:
        verdict = "a near tie" if difference["near_tie"] else "NOT a near tie"
        lines.append(f"  rounding error {difference['rounding']:.3g} here, recomputed token {chosen}: {verdict}")
    if difference["reason"]:
        lines.append(f"  {difference['reason']}")
    return "\n".join(lines)
