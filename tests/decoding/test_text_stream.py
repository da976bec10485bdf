"""Streamed pieces join to the text of all ids, whatever the ids are and however they arrive."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
from hypothesis import example, given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hdtool.data import demo
from hdtool.runtime.generation.text_stream import REPLACEMENT, TextStream, bytes_of, text_of


@cache
def byte_level() -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(demo.MODEL)
    return tokenizer


@cache
def sentence_pieces() -> PreTrainedTokenizerBase:
    """As Llama 2 has them: a mark for spaces, the first one dropped, single bytes to fall back to."""
    words = ["<unk>", "▁", "▁a", "▁the", "b", "s", ".", "\n", "é"]
    vocabulary = {word: index for index, word in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def streamed(tokenizer: PreTrainedTokenizerBase, chunks: list[list[int]]) -> str:
    stream = TextStream(tokenizer)
    return "".join([*(stream.add(chunk) for chunk in chunks), stream.end()])


@given(st.lists(st.lists(st.integers(0, 4095), max_size=4), max_size=30))
def test_pieces_of_any_ids_join_to_the_whole(chunks: list[list[int]]) -> None:
    assert streamed(byte_level(), chunks) == text_of(byte_level(), [id_ for chunk in chunks for id_ in chunk])


@given(st.text(st.characters(codec="utf-8")), st.integers(1, 4), st.sampled_from([byte_level, sentence_pieces]))
@example("Grüße, 世界 🌍!\n the a", 1, sentence_pieces)
def test_pieces_of_any_text_join_to_the_whole(
    text: str, size: int, make: Callable[[], PreTrainedTokenizerBase]
) -> None:
    """SentencePiece spells what it has no word for in bytes; only whole characters are tried here,
    since it takes back a valid byte when an invalid one follows, which no stream can know."""
    tokenizer = make()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert streamed(tokenizer, [ids[at : at + size] for at in range(0, len(ids), size)]) == text_of(tokenizer, ids)


@given(st.text(st.characters(codec="utf-8")))
def test_bytes_of_tokens_join_to_those_of_the_text(text: str) -> None:
    ids = byte_level()(text, add_special_tokens=False)["input_ids"]
    assert b"".join(bytes_of(byte_level(), id_) for id_ in ids) == text.encode()


def test_a_part_of_a_character_has_bytes_of_its_own() -> None:
    for tokenizer in (byte_level(), sentence_pieces()):
        ids = tokenizer("世", add_special_tokens=False)["input_ids"]
        assert b"".join(bytes_of(tokenizer, id_) for id_ in ids[-3:]) == "世".encode()
        assert REPLACEMENT.encode() not in map(partial(bytes_of, tokenizer), ids)


def test_no_half_characters_are_shown() -> None:
    tokenizer = byte_level()
    ids = tokenizer("世界🌍", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3, "the demo tokenizer spells these characters in bytes"
    stream = TextStream(tokenizer)
    assert "\ufffd" not in "".join(stream.add([id_]) for id_ in ids)


def test_special_tokens_are_not_shown() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer("done", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    assert text_of(tokenizer, ids) == "done"


class Redecoding:
    """The pieces as they are defined: all ids since the piece before the last are decoded, special tokens as well."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.ids, self.start, self.read = tokenizer, list[int](), 0, 0

    def add(self, ids: list[int]) -> str:
        self.ids += ids
        known = text_of(self.tokenizer, self.ids[self.start : self.read])
        fresh = text_of(self.tokenizer, self.ids[self.start :])[len(known) :]
        if not fresh or fresh.endswith(REPLACEMENT):
            return ""
        self.start, self.read = self.read, len(self.ids)
        return fresh


@cache
def with_added_tokens() -> PreTrainedTokenizerBase:
    """Sentence pieces with special tokens, one of which is no name of the tokenizer's, and an added word."""
    tokenizer = sentence_pieces()
    tokenizer.add_special_tokens({"eos_token": "</s>", "additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens(["<word>"])
    return tokenizer


TOKENIZERS = [byte_level, with_added_tokens]


@st.composite
def chunks_of_ids(draw: st.DrawFn) -> tuple[PreTrainedTokenizerBase, list[list[int]]]:
    """Ids of all kinds in chunks: words, bytes, special tokens and ids that the tokenizer lacks."""
    tokenizer = draw(st.sampled_from(TOKENIZERS))()
    special = st.sampled_from(tokenizer.all_special_ids)
    spelt = tokenizer("世界 the a, Grüße", add_special_tokens=False)["input_ids"]
    ids = st.one_of(special, special, st.sampled_from(spelt), st.integers(0, len(tokenizer) + 3))
    return tokenizer, draw(st.lists(st.lists(ids, max_size=3), max_size=30))


@given(chunks_of_ids())
def test_pieces_are_the_same_as_if_everything_was_decoded_again(
    drawn: tuple[PreTrainedTokenizerBase, list[list[int]]],
) -> None:
    tokenizer, chunks = drawn
    ours, again = TextStream(tokenizer), Redecoding(tokenizer)
    assert [ours.add(chunk) for chunk in chunks] == [again.add(chunk) for chunk in chunks]


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", ["", "the a"])
def test_a_run_of_special_tokens_is_decoded_once(
    make: Callable[[], PreTrainedTokenizerBase], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of decoded ids grows with the number of ids, not with its square."""
    tokenizer = make()
    decoded: list[int] = []
    decode = tokenizer.decode

    def counted(ids: list[int], **options: Any) -> Any:
        decoded.append(len(ids))
        return decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    run = tokenizer.all_special_ids * (300 // len(tokenizer.all_special_ids))
    stream = TextStream(tokenizer)
    pieces = [stream.add([id_]) for id_ in [*ids, *run, *ids]]
    assert sum(decoded) < 10 * (len(run) + 2 * len(ids))
    assert "".join(pieces) + stream.end() == decode([*ids, *run, *ids], skip_special_tokens=True)
