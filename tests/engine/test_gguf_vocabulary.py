"""Tokenizers from GGUF give the ids of the tokenizers that they were made from."""

import functools
import json
from pathlib import Path

import gguf
import pytest
import tokenizers
from model_files import add_byte_level_tokenizer, save_gguf, stored
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from mooncake_zmq.engine import gguf_vocabulary
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.prepare import prepare
from mooncake_zmq.engine.sources.dummy import DummySource
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.gateway.openai.token_stream import TokenStream

CORPUS = [
    "The lighthouse keeper kept two logbooks: one for the weather, one for the hours of the lamp.",
    "def merge(left, right):\n    while left and right:\n        merged.append(left.pop(0))\n    return merged",
    "In 2024 they paid $1,234,567.89 for 3 things; it's what we'll do, isn't it?",
    "naïve café, Zürich, straße; русский язык; 東京の天気",
] * 3
TEXTS = [
    *CORPUS[:4],
    "",
    " ",
    "   three spaces   and\ttabs\n\n\n",
    "Hello, World! It's 12345678 o'clock; THEY'LL come.",
    "🙂👩\u200d🚀 emoji the corpus lacks, \u0000 and e\u0301 decomposed",
    "aaaaaaaaaaaaaaaaaaaaaaaa keke kekeke",
    "<s>control</s> and <tool>shown</tool>",
    "▁already▁there",
]
CONTROL, SHOWN = ["<unk>", "<s>", "</s>"], ["<tool>", "</tool>"]


def trained(model, trainer, **parts):
    tokenizer = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in SHOWN])
    return tokenizer


def parts_of(tokenizer):
    """(tokens by id, merges, token types) of a reference tokenizer."""
    fields = json.loads(tokenizer.to_str())
    ids = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ")) for merge in fields["model"]["merges"]]
    kinds = [
        2 if token == "<unk>" else 3 if token in CONTROL else 4 if token in SHOWN else 6 if token.startswith("<0x") else 1
        for token in tokens
    ]
    return tokens, merges, kinds


def same(built, reference):
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert built.encode(text, add_special_tokens=False).ids == ids, text
        assert built.decode(ids) == reference.decode(ids), text


LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "qwen2", "tekken"])
def test_byte_level_bpe(pre):
    pattern = {"llama-bpe": LLAMA3, "qwen2": QWEN2, "tekken": TEKKEN}.get(pre)
    cuts = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    if pattern:
        cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")]
    cut = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    reference = trained(
        models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")),
        trainers.BpeTrainer(vocab_size=420, special_tokens=CONTROL, initial_alphabet=alphabet, show_progress=False),
        pre_tokenizer=cut,
        decoder=decoders.ByteLevel(),
        **({"normalizer": normalizers.NFC()} if pre == "qwen2" else {}),
    )
    tokens, merges, kinds = parts_of(reference)
    same(gguf_vocabulary.byte_level_bpe(tokens=tokens, merges=merges, kinds=kinds, pre=pre), reference)


@pytest.fixture(scope="module")
def sentencepiece():
    """As Llama 2's tokenizer.json is built; trained here. A merge's rank is its piece's score, as sentencepiece writes it."""
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*CONTROL, *byte_tokens], show_progress=False)
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    learnt = trained(models.BPE(), trainer, normalizer=normalizers.Sequence(spaces))
    tokens, merges, kinds = parts_of(learnt)
    ids = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    reference = tokenizers.Tokenizer(model)
    reference.normalizer, reference.decoder = normalizers.Sequence(spaces), decoders.Sequence(steps)
    reference.add_special_tokens([AddedToken(token, normalized=False) for token in CONTROL])
    reference.add_tokens([AddedToken(token, normalized=False) for token in SHOWN])
    ranks = {left + right: rank for rank, (left, right) in enumerate(merges)}
    scores = [
        0.0 if kind != 1 else -float(ranks.get(token, len(merges) + ids[token]))
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    return reference, tokens, scores, kinds


def test_sentencepiece_bpe(sentencepiece):
    reference, tokens, scores, kinds = sentencepiece
    same(gguf_vocabulary.sentencepiece_bpe(tokens=tokens, scores=scores, kinds=kinds, space_prefix=True), reference)


def test_sentencepiece_without_a_space_in_front(sentencepiece):
    _, tokens, scores, kinds = sentencepiece
    built = gguf_vocabulary.sentencepiece_bpe(tokens=tokens, scores=scores, kinds=kinds, space_prefix=False)
    for text in TEXTS[:-2]:
        assert built.decode(built.encode(text).ids) == text


def add_sentencepiece(writer, vocab_size, *, tokens, scores, kinds):
    filler = vocab_size - len(tokens)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*tokens, *(f"<filler{number}>" for number in range(filler))])
    writer.add_token_scores([*scores, *[0.0] * filler])
    writer.add_token_types([*kinds, *[5] * filler])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(
        [{"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}"}, {"name": "tool_use", "template": "tools"}]
    )


def test_a_sentencepiece_model_through_the_whole_path(sentencepiece, tmp_path):
    reference, tokens, scores, kinds = sentencepiece
    add = functools.partial(add_sentencepiece, tokens=tokens, scores=scores, kinds=kinds)
    config, tensors = stored(DummySource('{"vocab_size": 640}'))
    path = save_gguf(tmp_path / "model.gguf", config, tensors, add_tokenizer=add)
    tokenizer = open_tokenizer(prepare(str(path), tmp_path))
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text).tolist() == [1, *ids], "Llama 2's begin with BOS unless the file says otherwise"
        stream = TokenStream(tokenizer)
        assert "".join([stream.push(token) for token in ids]) + stream.flush() == reference.decode(ids)
    assert tokenizer.chat([{"role": "user", "content": "keeper"}]).tolist() == reference.encode("<s>keeper").ids
    assert tokenizer.eos_ids == (2,)


def test_an_answer_ends_at_each_token_that_ends_one_by_its_text(tmp_path):
    def add(writer, vocab_size):
        add_byte_level_tokenizer(writer, vocab_size, ends={5: "<|endoftext|>", 7: "<|im_end|>", 9: "<|fim_pad|>"})

    config, tensors = stored(DummySource("tiny"))
    source = GgufSource(save_gguf(tmp_path / "model.gguf", config, tensors, add_tokenizer=add))
    assert source.spec.eos_ids == (5, 7, 9, source.spec.vocab_size - 1), "Qwen2.5's metadata names <|im_end|> alone"


@pytest.mark.parametrize(("model", "pre"), [("bert", "default"), ("t5", "default"), ("gpt2", "viking")])
def test_unknown_tokenizers_are_refused_by_name_at_open(tmp_path, model, pre):
    def add(writer, vocab_size):
        writer.add_tokenizer_model(model)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list([str(number) for number in range(vocab_size)])

    config, tensors = stored(DummySource("tiny"))
    with pytest.raises(ModelError, match=f"{pre if model == 'gpt2' else model!r}.*not supported"):
        GgufSource(save_gguf(tmp_path / "model.gguf", config, tensors, add_tokenizer=add))


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("scores", [0.0] * 3),
        ("scores", ["x"] * 512),
        ("scores", [[0.0, 1.0]] * 512),
        ("scores", [float("nan")] * 512),
        ("token_type", [1] * 3),
        ("token_type", ["x"] * 512),
        ("merges", ["no such"]),
        ("merges", [1, 2]),
    ],
)
def test_damaged_vocabularies_are_refused(tmp_path, field, values):
    def add(writer, vocab_size):
        writer.add_tokenizer_model("llama" if field == "scores" else "gpt2")
        writer.add_token_list([str(number) for number in range(vocab_size)])
        whole = {"scores": [0.0] * vocab_size, "token_type": [1] * vocab_size, "merges": ["1 1"]} | {field: values}
        for key, value in whole.items():
            writer.add_array(f"tokenizer.ggml.{key}", value)

    config, tensors = stored(DummySource("tiny"))
    source = GgufSource(save_gguf(tmp_path / "model.gguf", config, tensors, add_tokenizer=add))
    with pytest.raises(ModelError):
        source.read_tokenizer()


def test_token_kinds_are_those_of_the_format():
    assert {kind.name: kind.value for kind in gguf_vocabulary.TokenKind} == {kind.name: kind.value for kind in gguf.TokenType}


RECORDED = json.loads((Path(__file__).parent.parent / "golden" / "sentencepiece.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", RECORDED["texts"])
def test_ids_are_those_of_the_sentencepiece_library(text):
    """golden/make_sentencepiece.py"""
    parts = {name: RECORDED[name] for name in ("tokens", "scores", "kinds")}
    built = gguf_vocabulary.sentencepiece_bpe(**parts, space_prefix=True)
    assert built.encode(text).ids == RECORDED["texts"][text]
    assert built.decode(RECORDED["texts"][text]) == text
