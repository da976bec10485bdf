"""What a model ranks highest after each token of its vocabulary alone, computed once from its weights.

One pass for each batch of tokens, each after the token that begins a text, if there is one.
"""

from __future__ import annotations

import numpy as np
import torch

from hdtool.data.progress import bar
from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.stores.model_store import RANKED, Ints

BATCH = 256
"""Tokens of a pass."""
WHOLE = 1_000_000
"""Probabilities are in millionths."""


def vocabulary_rankings(loaded: Loaded, vocabulary: int, *, quiet: bool = True) -> Ints:
    """A row for each token: the best tokens after it, then their probabilities; -1 and 0 where nothing is known."""
    target, begin = loaded.target, loaded.tokenizer.bos_token_id
    rows: Ints = np.full((vocabulary, 2 * RANKED), -1, np.int32)
    rows[:, RANKED:] = 0
    readable = min(vocabulary, target.vocabulary)
    with bar(vocabulary, "rankings", unit="tokens", quiet=quiet) as shown, torch.inference_mode():
        for start in range(0, readable, BATCH):
            ids = torch.arange(start, min(readable, start + BATCH), device=target.device)[:, None]
            if begin is not None:
                ids = torch.cat([torch.full_like(ids, begin), ids], 1)
            logits = target.model(input_ids=ids, use_cache=False).logits[:, -1, :readable].float()
            best, scores = topk(logits, RANKED)
            probs = np.exp(scores - logits.logsumexp(-1, keepdim=True).cpu().numpy())
            usable = np.isfinite(probs)
            rows[start : start + len(ids), :RANKED] = np.where(usable, best, -1)
            rows[start : start + len(ids), RANKED:] = np.where(usable, probs * WHOLE, 0)
            shown.to(start + len(ids))
    return rows
