"""Ids that are put together from kept ones are the ids of the whole text, whatever the tokenizer; others' are never used."""

import threading
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, trainers

from mooncake_zmq.engine.text_cache import SHORTEST, TextCache, cuts

MARKS = ("<|im_start|>", "<|im_end|>", "<|im_|>", "<tool>")
CORPUS = ["the quick brown fox, the lazy dog: 12 345 naïve cafés\n\n\tdef f(x): return x"] * 4
ODD = ["<|im", "_start|>", "<|", "|>", "<tool", " ", "  ", "\n", "\n\n", "the quick", "Brown", "12 3"]
UNICODE = ["é", "e\u0301", "ﬁ", "👩\u200d🚀"]
FRAGMENTS = st.sampled_from([*MARKS, *ODD, *UNICODE]) | st.text(max_size=8)


def bpe(
    pre: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None, added: Sequence[AddedToken] = ()
) -> tokenizers.Tokenizer:
    """A tokenizer learnt from a few words, with special tokens."""
    made = tokenizers.Tokenizer(models.BPE(unk_token="?"))
    made.pre_tokenizer = pre
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["?"]))
    made.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in MARKS])
    made.add_tokens([*added])
    return made


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
CUT = {
    "bytes": bpe(BYTES),
    "bytes with a blank before each part": bpe(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits": bpe(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTES])),
    "nfkc, lower case": bpe(BYTES, normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "metaspace before each part": bpe(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "added in the normalized text": bpe(BYTES, normalizers.Lowercase(), [AddedToken("quick", normalized=True)]),
}
WHOLE = {
    "metaspace before the first part": bpe(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "takes blanks on the left": bpe(BYTES, None, [AddedToken("<mask>", lstrip=True, normalized=False)]),
    "takes blanks on the right": bpe(BYTES, None, [AddedToken("<mask>", rstrip=True, normalized=False)]),
    "only whole words": bpe(BYTES, None, [AddedToken("fox", single_word=True, normalized=False)]),
}


class Counting:
    """The tokenizer's own way, which counts what it is given."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[list[int]]:
        self.texts += texts
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def cache_of(tokenizer: tokenizers.Tokenizer, **limits: int) -> tuple[TextCache, Counting]:
    encode = Counting(tokenizer)
    found = cuts([*tokenizer.get_added_tokens_decoder().items()], encode)
    encode.texts.clear()
    return TextCache(encode, found, **limits), encode


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
@given(parts=st.lists(FRAGMENTS, max_size=12), repeat=st.integers(1, 20))
def test_ids_are_those_of_the_whole_text(name: str, parts: list[str], repeat: int) -> None:
    tokenizer = (CUT | WHOLE)[name]
    cache, _ = cache_of(tokenizer)
    text = "".join(part * repeat if part not in MARKS else part for part in parts)
    (whole,) = Counting(tokenizer)([text])
    for _ in range(2):
        assert cache.encode(text, "salt").tolist() == whole
    (longer,) = Counting(tokenizer)([f"{text}<|im_end|>\n{text}"])
    assert cache.encode(f"{text}<|im_end|>\n{text}", "salt").tolist() == longer


@pytest.mark.parametrize("name", CUT)
def test_the_next_turn_has_its_new_text_tokenized_alone(name: str) -> None:
    cache, encode = cache_of(CUT[name])
    turns = [f"<|im_start|>user\n{word * SHORTEST}<|im_end|>" for word in ("fox ", "dog ", "lazy ")]
    cache.encode("".join(turns[:2]), "salt")
    encode.texts.clear()
    cache.encode("".join(turns), "salt")
    assert "".join(encode.texts) == f"user\n{'lazy ' * SHORTEST}"


@pytest.mark.parametrize("name", WHOLE)
def test_a_text_is_not_cut_where_its_parts_depend_on_each_other(name: str) -> None:
    cache, encode = cache_of(WHOLE[name])
    text = f"<|im_start|>{'fox ' * SHORTEST}<|im_end|>"
    for _ in range(2):
        cache.encode(text, "salt")
    assert encode.texts == [text, text]


def test_nothing_of_another_salt_or_without_one_is_used() -> None:
    cache, encode = cache_of(CUT["bytes"])
    text = f"<|im_start|>{'fox ' * SHORTEST}"
    for salt in ("alice", "bob", "", None, None):
        encode.texts.clear()
        cache.encode(text, salt)
        assert sum(map(len, encode.texts)) >= len("fox ") * SHORTEST
    encode.texts.clear()
    for salt in ("alice", "bob", ""):
        cache.encode(text, salt)
    assert "".join(encode.texts) == ""


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes_first() -> None:
    old, new, third = texts = [f"{word * SHORTEST}<|im_end|>" for word in ("lazy ", "yzal ", "azly ")]
    unbounded, _ = cache_of(CUT["bytes"])
    for text in texts:
        unbounded.encode(text, "salt")
    most = unbounded.kept_bytes - 1
    cache, encode = cache_of(CUT["bytes"], max_bytes=most)
    for text in (old, new, old, third):
        cache.encode(text, "salt")
    assert 0 < cache.kept_bytes <= most
    encode.texts.clear()
    cache.encode(old, "salt")
    assert "".join(encode.texts) == ""
    cache.encode(new, "salt")
    assert "yzal" in "".join(encode.texts)
    assert cache.encode("é" * 10_000, "salt").tolist() == Counting(CUT["bytes"])(["é" * 10_000])[0]
    assert cache.kept_bytes <= most


def test_threads_get_the_ids_of_their_own_texts() -> None:
    cache, encode = cache_of(CUT["bytes"], max_bytes=5_000)
    texts = [f"<|im_start|>{word * SHORTEST}<|im_end|>{word * SHORTEST}" for word in ("fox ", "dog ", "lazy ", "é")]
    wanted = encode(texts)
    wrong: list[str] = []

    def work(mine: int) -> None:
        for _ in range(200):
            if cache.encode(texts[mine], "salt").tolist() != wanted[mine]:
                wrong.append(texts[mine])

    threads = [threading.Thread(target=work, args=(number % len(texts),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
