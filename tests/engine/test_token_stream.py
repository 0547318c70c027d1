"""The text of a stream of tokens never cuts a character, and is that of all its tokens: with the vocabularies of engines."""

import pytest
from texts import TEXTS

from mooncake_zmq.engine.tokenizer import ByteVocabulary, byte_tokenizer
from mooncake_zmq.gateway.openai.token_stream import PENDING_TOKENS_MAX, TokenStream


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("text", [*TEXTS, "<|im_start|>a<|im_end|>b"])
def test_whole_characters_add_up_to_what_the_tokenizer_decodes(tokenizer, text, special):
    ids = tokenizer.encode(text)
    stream = TokenStream(tokenizer, special=special)
    pieces = [stream.push(token) for token in ids]
    for piece in pieces:
        assert set(piece) <= set(text)
    assert "".join(pieces) + stream.flush() == tokenizer.decode(ids, special=special)


def test_bytes_that_are_no_text_are_not_held_for_ever():
    stream = TokenStream(byte_tokenizer())
    pieces = [stream.push(0xFF) for _ in range(100)]
    assert sum(map(len, pieces)) > 80
    assert len("".join(pieces) + stream.flush()) == 100
    assert [stream.push(token) for token in b"ok"] == ["o", "k"]


def test_nothing_is_kept_of_what_was_emitted_where_a_text_is_bytes(tokenizer):
    stream = TokenStream(tokenizer)
    for token in tokenizer.encode("naïve 漢字 🙂"):
        assert not stream.push(token) or not stream._ids


def test_tokens_without_text_are_not_kept():
    """Or each further one would cost more than the one before."""
    stream = TokenStream(byte_tokenizer())
    assert stream.push(ord("a")) == "a"
    invisible = [stream.push(ByteVocabulary.END_ID) for _ in range(1000)]
    assert set(invisible) == {""}
    assert len(stream._ids) <= 2 + PENDING_TOKENS_MAX
    assert [stream.push(token) for token in b"ok"] == ["o", "k"]
