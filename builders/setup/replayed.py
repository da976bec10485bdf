"""The held-out conversations replayed with one source after another: what each adds, and the speed to expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hdtool.builders.setup.overhead import Overhead
from hdtool.data.progress import bar
from hdtool.runtime.budget.cost_curve import CostCurve
from hdtool.runtime.config import DecodeConfig
from hdtool.runtime.config.decoding import NO_HISTORY
from hdtool.runtime.config.methods import HISTORY_LETTER, SOURCE_NAMES
from hdtool.runtime.evaluation.recorded_turns import RecordedTurn
from hdtool.runtime.evaluation.replay import Contender
from hdtool.runtime.evaluation.worker_pool import replay, turns_in
from hdtool.runtime.stores.store_set import StoreSet


def replayed(
    conversations: Sequence[Sequence[RecordedTurn]],
    store_set: StoreSet,
    curve: CostCurve,
    overhead: Overhead,
    *,
    quiet: bool,
) -> dict[str, Any]:
    """Tokens per step by source, and tokens per second of all sources but the history, which begins empty."""
    stores = {"M": store_set.model, "S": store_set.corpus}
    letters = "C" + "".join(letter for letter, store in stores.items() if store)
    contenders = [_cold(letters[: place + 1], curve) for place in range(len(letters))]
    cold = contenders[-1].name
    contenders.append(Contender(SOURCE_NAMES[HISTORY_LETTER], DecodeConfig(sources=HISTORY_LETTER + letters), curve))
    with bar(turns_in(contenders, conversations, ()), "turns", quiet=quiet) as shown:
        played = replay(contenders, conversations, store_set, on_progress=shown.to)
    predicted = overhead.predict(played[cold], curve)
    return {
        "tokens_per_step": {name: round(result.tokens_per_step, 3) for name, result in played.items()},
        "accepted": {str(source): share.accepted for source, share in played[cold].by_source().items()},
        "draft_tokens_per_step": round(played[cold].nodes_per_step, 1),
        "tokens_per_second": predicted.tokens_per_second,
        "plain_tokens_per_second": predicted.plain_tokens_per_second,
    }


def replayed_with_model_store(
    conversations: Sequence[Sequence[RecordedTurn]], store_set: StoreSet, curve: CostCurve, *, quiet: bool
) -> float:
    """Tokens per step of the conversation and the model store alone."""
    contender = _cold("CM", curve)
    with bar(turns_in([contender], conversations, ()), "turns", quiet=quiet) as shown:
        played = replay([contender], conversations, store_set, on_progress=shown.to)
    return round(played[contender.name].tokens_per_step, 3)


def _cold(letters: str, curve: CostCurve) -> Contender:
    """Sources without a history, by the name of the last one."""
    return Contender(SOURCE_NAMES[letters[-1]], DecodeConfig(sources=letters, history=NO_HISTORY), curve)
