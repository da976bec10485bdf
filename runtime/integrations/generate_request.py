"""Reads the arguments of ``model.generate``, refuses calls that the loop cannot decode, and stores rollouts.

Rollouts are earlier answers to a prompt, from which later answers to it are drafted. Reinforcement learning repeats the
same prompts in every epoch, and several times in a batch. A history would be searched by the last tokens, and its
latest matches would soon be answers to other prompts. Rollouts are looked up by their prompt instead.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import MaxLengthCriteria

from hdtool.data.errors import OptionError
from hdtool.runtime.generation.generation_settings import refused_setting
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.model.transformers_internals import CACHE_NAMES, cache_in, is_own_cache
from hdtool.runtime.stores.token_log import MAX_MATCHES

if TYPE_CHECKING:
    from transformers import GenerationConfig, StoppingCriteriaList

MAX_ANSWERS = MAX_MATCHES
"""Maximum number of answers kept per prompt; a drafter reads no more matches of the same tokens than this."""
TAIL = 8
"""Number of prompt tokens that are repeated before each answer, so that a drafter finds where answers begin."""


class Rollouts:
    """Keeps the earlier answers to each prompt; the answers to the least recently used prompts are dropped first."""

    def __init__(self, max_tokens: int) -> None:
        """Keep at most ``max_tokens`` answer tokens, and prompts as hashes only; raise OptionError if negative."""
        if max_tokens < 0:
            raise OptionError(f"rollouts is {max_tokens}, but it is a number of tokens to keep: give 0 or more")
        self._max_tokens = max_tokens
        self._answers: OrderedDict[bytes, deque[Ints]] = OrderedDict()
        self.tokens = 0
        """Total number of tokens in the answers that are kept."""

    def __bool__(self) -> bool:
        return self._max_tokens > 0

    def __len__(self) -> int:
        """Return the number of prompts whose answers are kept."""
        return len(self._answers)

    def prediction(self, prompt: Sequence[int], given: Sequence[int] = ()) -> list[int]:
        """Concatenate the earlier answers to a prompt, oldest first, and the ``given`` prediction.

        The last ``TAIL`` tokens of the prompt are inserted between any two of them.
        """
        if not self._answers:
            return list(given)
        key = _key_of(prompt)
        earlier = self._answers.get(key, ())
        if not earlier:
            return list(given)
        self._answers.move_to_end(key)
        tail, predicted = list(prompt[-TAIL:]), list[int]()
        for answer in [*earlier, *([given] if given else [])]:
            predicted += tail if predicted else []
            predicted += np.asarray(answer).tolist()
        return predicted

    def add(self, prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, and drop old ones to stay within the limits."""
        if not self._max_tokens or not answer:
            return
        key, kept = _key_of(prompt), np.array(answer[: self._max_tokens], np.int32)
        answers = self._answers.setdefault(key, deque())
        self._answers.move_to_end(key)
        answers.append(kept)
        self.tokens += len(kept)
        if len(answers) > MAX_ANSWERS:
            self.tokens -= len(answers.popleft())
        while self.tokens > self._max_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest answer to the least recently used prompt."""
        key, answers = next(iter(self._answers.items()))
        self.tokens -= len(answers.popleft())
        if not answers:
            del self._answers[key]


def _key_of(prompt: Sequence[int]) -> bytes:
    return blake2b(np.array(prompt, np.int64).tobytes(), digest_size=16).digest()


PLAIN_MODES = ("greedy_search", "sample")
SUPPORTED_ARGUMENTS = (
    "attention_mask",
    "position_ids",
    *CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "inputs_embeds",
)
"""Model arguments that ``_refuse_inputs`` accepts, because they have no effect here or are checked separately."""
ENCODER_OUTPUTS = "mm_encoder_outputs"
"""Argument with the images, videos and audio that ``generate`` has encoded, by kind; empty for a text prompt."""
ZERO_IS_TEXT = {"mm_token_type_ids": None, "moe_mm_token_type_ids": None, "token_type_ids": ("gemma3",)}
"""Maps each argument in which zeros mark text to the model types for which this holds; None stands for all types.

Other model types add an embedding for token type 0.
"""


class UnsupportedCallError(OptionError):
    """Raised for calls of ``generate`` that hdtool's loop cannot decode."""


@dataclass(frozen=True)
class GenerateRequest:
    """One row of a batch passed to ``generate``."""

    prompt: list[int]
    padding: list[int]
    """Masked tokens before the prompt; processors and criteria see them, the model does not."""
    max_new_tokens: int
    draws: bool
    wants_scores: bool
    wants_logits: bool
    wants_details: bool
    """True if ``generate`` returns an output object instead of ids."""

    @classmethod
    def rows_of(
        cls,
        input_ids: torch.Tensor,
        settings: GenerationConfig,
        criteria: StoppingCriteriaList,
        model_arguments: Mapping[str, Any],
        *,
        model_type: str = "",
        synced_gpus: bool = False,
    ) -> list[GenerateRequest]:
        """Make one request per row of the batch; raise UnsupportedCallError if the loop does not support the call."""
        if synced_gpus:
            raise _refusal(
                "synced_gpus is set", "processes that share a model by ZeRO-3 or FSDP must make equally many passes"
            )
        _refuse_settings(settings)
        _refuse_inputs(input_ids, model_arguments, model_type)
        mask, positions = (model_arguments.get(name) for name in ("attention_mask", "position_ids"))
        length = input_ids.shape[1]
        longest = min(
            (criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)),
            default=settings.max_length,
        )
        details = bool(settings.return_dict_in_generate)
        rows = []
        for row, ids in enumerate(input_ids.tolist()):
            padded = _padding_of(None if mask is None else mask[row], length)
            _refuse_positions(_row_of(positions, row, len(input_ids)), padded, length)
            rows.append(
                cls(
                    prompt=ids[padded:],
                    padding=ids[:padded],
                    max_new_tokens=max(1, longest - length),  # generate also makes a token before it checks the length
                    draws=bool(settings.do_sample),
                    wants_scores=details and bool(settings.output_scores),
                    wants_logits=details and bool(settings.output_logits),
                    wants_details=details,
                )
            )
        return rows


def predictions_of(prediction: Any, rows: int) -> list[list[int]]:
    """Return each row's predicted token ids, each read by ``predicted_ids``.

    ``prediction`` holds one prediction for all rows, or one for each row.
    """
    ids = prediction.tolist() if hasattr(prediction, "tolist") else prediction
    if (
        isinstance(ids, (list, tuple))
        and len(ids) == rows > 1
        and all(isinstance(row_ids, (list, tuple)) for row_ids in ids)
    ):
        return [predicted_ids(row_ids) for row_ids in ids]
    return [predicted_ids(ids)] * rows


def predicted_ids(prediction: Any) -> list[int]:
    """Return the token ids of a predicted output; ``prediction`` is a list or tensor, ``[tokens]`` or ``[1, tokens]``.

    None gives an empty list. Raise OptionError for anything else.
    """
    ids = prediction.tolist() if hasattr(prediction, "tolist") else prediction
    if ids is None:
        return []
    if isinstance(ids, (list, tuple)) and len(ids) == 1 and isinstance(ids[0], (list, tuple)):
        ids = ids[0]
    if not isinstance(ids, (list, tuple)) or not all(type(token) is int for token in ids):
        raise OptionError(
            "a prediction must be token ids of one answer: give tokenizer(text, add_special_tokens=False)['input_ids']"
        )
    return list(ids)


def _refuse_settings(settings: GenerationConfig) -> None:
    if refused := refused_setting(settings, allowed=("num_return_sequences",)):
        name, reason = refused
        raise _refusal(f"{name} is {getattr(settings, name)!r}", reason)
    mode = settings.get_generation_mode()
    if mode not in PLAIN_MODES:
        raise _refusal(f"the mode is {mode.value}", "it drafts for greedy decoding and sampling")
    if settings.return_dict_in_generate and (settings.output_attentions or settings.output_hidden_states):
        raise _refusal("output_attentions or output_hidden_states is set", "those of a tree are not those of an answer")


def _refuse_inputs(input_ids: torch.Tensor, arguments: Mapping[str, Any], model_type: str) -> None:
    if arguments.get("inputs_embeds") is not None:
        raise _refusal("inputs_embeds are given", "it drafts from token ids: give input_ids")
    if input_ids.shape[0] == 0:
        raise _refusal("the batch is empty", "generation needs at least one prompt")
    if input_ids.shape[1] == 0:
        raise _refusal("the prompt is empty", "generation needs at least one token")
    if is_own_cache(cache_in(arguments)):
        raise _refusal("a KV cache is given", "it uses its own cache, which supports rejected drafts")
    if inputs := arguments.get(ENCODER_OUTPUTS):
        raise _refusal(f"{' and '.join(inputs)} input is given", "it reads text alone")
    foreign = [
        name
        for name, value in arguments.items()
        if name not in SUPPORTED_ARGUMENTS and _is_set(name, value, model_type)
    ]
    if foreign:
        raise _refusal(f"{', '.join(foreign)} is given", "it passes only token ids to the model")


def _is_set(name: str, value: object, model_type: str) -> bool:
    """Return True if an argument changes what the model computes.

    Tensors do, even tensors of zeros, unless zeros mark text in this argument. None, False and empty mappings do not.
    """
    if isinstance(value, torch.Tensor):
        types = ZERO_IS_TEXT.get(name, ())
        is_text = (types is None or model_type in types) and not value.any()
        return not is_text
    if isinstance(value, Mapping):
        return len(value) > 0
    return value is not None and value is not False


def _row_of(positions: torch.Tensor | None, row: int, rows: int) -> torch.Tensor | None:
    """Return a row's positions; None and positions that all rows share, such as ``[1, tokens]``, are unchanged."""
    has_rows = positions is not None and positions.dim() > 1 and positions.shape[-2] == rows
    return positions[..., row, :] if positions is not None and has_rows else positions


def _padding_of(mask: torch.Tensor | None, length: int) -> int:
    """Return how many tokens the mask of a row hides on the left; raise UnsupportedCallError if it hides any others."""
    if mask is None:
        return 0
    seen: list[bool] = mask.bool().tolist()
    padded = seen.index(True) if True in seen else length
    if len(seen) != length or padded == length or not all(seen[padded:]):
        raise _refusal("the attention mask has gaps", "only padding on the left can be left out of a prompt")
    return padded


def _refuse_positions(positions: torch.Tensor | None, padded: int, length: int) -> None:
    """Raise UnsupportedCallError unless positions count up from 0 after the padding, as they do by default.

    Models with several position axes have positions ``[axes, tokens]``.
    """
    if positions is None:
        return
    expected = torch.arange(length - padded, device=positions.device)
    if positions.shape[-1] != length or not (positions[..., padded:] == expected).all():
        raise _refusal("position_ids are not 0, 1, 2, …", "it places the tokens of a draft tree itself")


def _refusal(feature: str, reason: str) -> UnsupportedCallError:
    return UnsupportedCallError(f"hdtool cannot decode this call of generate: {feature}, but {reason}")
