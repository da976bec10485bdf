"""Checks claims of the Hierarchy Drafting paper on recorded answers, by its own lookup policy.

    python -m tests.benchmarks.paper_claims traces.jsonl --model MODEL --model-db FOLDER --corpus-db FOLDER

Replays every subset of the context (C), the model store (M) and the corpus index (S), and all of them in every order.
The paper finds that C is accepted more often than M, and M more often than S, that each of them has tokens accepted
that no other one has, that C and M together beat any single source, and that C, M, S is the best order.
"""

from __future__ import annotations

from itertools import combinations, permutations

import numpy as np
import torch

from hdtool.builders.evaluation.report.replayed_sources import Study, source_shares
from hdtool.builders.evaluation.report.tables import Table
from hdtool.runtime.config.draft_sources import source_of
from hdtool.runtime.config.draft_token_limits import FIXED_BUDGET
from tests.benchmarks.laboratory import parser_of_recordings, read_recordings

METHOD = "hd-paper"


def subsets(letters: str) -> list[str]:
    """Return all non-empty subsets of ``letters``, ordered by size."""
    return ["".join(chosen) for size in range(1, len(letters) + 1) for chosen in combinations(letters, size)]


def main() -> None:
    options = parser_of_recordings(__doc__, draft_tokens=FIXED_BUDGET).parse_args()
    torch.set_num_threads(1)
    conversations, stores = read_recordings(options)
    study = Study(conversations, stores, options.draft_tokens, method=METHOD)
    orders = ["".join(order) for order in permutations(study.store_set.letters)]
    results = study.results(list(dict.fromkeys([*subsets(study.store_set.letters), *orders])))
    columns = {"sources": "", "tokens per step": ".3f", "drafting, µs a step": ".0f"}
    rows = ((sources, result.tokens_per_step, result.draft_us(50)) for sources, result in results.items())
    print(Table.of("", columns, rows).markdown() + "\n")
    accepted = {
        letter: np.concatenate([turn.sources for turn in results[letter].turns]) == source_of(letter)
        for letter in study.store_set.letters
    }
    times_accepted = np.sum(list(accepted.values()), axis=0)
    shares = source_shares(METHOD, results[study.store_set.letters]).sources
    columns = {"source": "", "verify success": ".1%", "of its tokens accepted": ".1%", "from no other, alone": ","}
    alone = {str(source_of(letter)): int((own & (times_accepted == 1)).sum()) for letter, own in accepted.items()}
    found = ((name, share.win_rate, share.acceptance_rate, alone[name]) for name, share in shares.items())
    print(Table.of("", columns, found).markdown())


if __name__ == "__main__":
    main()
