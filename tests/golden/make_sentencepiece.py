"""Writes sentencepiece.json: a tiny model trained by the sentencepiece library, with the ids it gives to some texts.

As Llama 2's is made: BPE, byte fallback, a space put in front, single digits. GGUF carries the same three lists. Run it in
an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install sentencepiece protobuf
    /tmp/golden/bin/python tests/golden/make_sentencepiece.py
"""

import io
import json
from pathlib import Path

import sentencepiece

CORPUS = [
    "The lighthouse at Corran Point was built in 1874, after three ships were lost in a single winter.",
    "Its keeper, a quiet man named Alasdair Mure, kept two logbooks: one for the harbour office, one for himself.",
    "On the 14th of February he found a crate of oranges; on the 2nd of March, a door with a brass number, 217.",
    '"Everything arrives," he wrote, "but seldom whole." Visitors often asked whether he was lonely.',
    "def merge(left, right):\n    while left and right:\n        merged.append(left.pop(0))\n    return merged",
    "naïve café, Zürich, straße; русский язык, ещё раз; 東京の天気は晴れ",
]
TEXTS = [
    *CORPUS,
    "Hello, world!",
    "  leading and trailing  ",
    "In 2024 we paid $1,234,567.89 for 3 things.",
    "def f(x):\n\treturn x ** 2  # square\n\n\n",
    "🙂👩\u200d🚀 beyond the corpus, and e\u0301 decomposed",
    "aaaaaaaaaaaaaaaa keke the the thethe winterwinter",
    "It's we'll they've I'm you'd don't",
    " ",
    "",
    "arrives arrived arriving, keeper's kept keeping keep",
]


def main() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 4),
        model_writer=model,
        model_type="bpe",
        vocab_size=560,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(processor.get_piece_size())
    kinds = [2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1 for i in ids]
    record = {
        "tokens": [processor.id_to_piece(i) for i in ids],
        "scores": [processor.get_score(i) for i in ids],
        "kinds": kinds,
        "texts": {text: processor.encode(text) for text in TEXTS},
    }
    path = Path(__file__).with_name("sentencepiece.json")
    path.write_text(json.dumps(record, ensure_ascii=False, separators=(",", ":")))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
