"""A stand-in for a vLLM server that speaks as it is told: in each turn of an agent it calls the agent's tool for commands.

It runs as a process of its own, so that it can be killed: `python scripted_vllm.py MODEL LOG`. Its first line of output is its
URL; LOG gets one JSON line for each prompt, one for each answer and one where an answer stands still to be killed.
"""

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from strange_model import write_model as write_strange_model
from stub_vllm import DONE, Pieces, StubVllm, event, usage
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe

TURNS = 20
STANDS_STILL_AT = 10
"""The turn in whose call the server stands still for a minute, or until it is killed."""
BLOCK = 32
END = 257
"""The token of `<|im_end|>`."""
IN_NAMESPACE_AT = 5
"""The turn that calls a function of a namespace too, if the agent has one."""
TEMPLATE = """{%- if messages[0].role in ("system", "developer") %}
{%- set system = messages[0].content %}{%- set messages = messages[1:] %}{%- endif %}
{{- "<|im_start|>system\\n" + (system or "You help.") }}
{%- if tools %}
{{- "\\n<tools>" }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{{- "\\n</tools>\\nWrite <tool_call>{...}</tool_call>" }}
{%- endif %}{{- "<|im_end|>\\n" }}
{%- for message in messages %}
{%- if message.role == "tool" %}
{{- "<|im_start|>user\\n<tool_response>\\n" + message.content + "\\n</tool_response><|im_end|>\\n" }}
{%- else %}
{{- "<|im_start|>" + message.role + "\\n" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- "}</tool_call>" }}
{%- endfor %}
{{- "<|im_end|>\\n" }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- "<|im_start|>assistant\\n" }}{%- endif %}"""

COMMANDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "Bash": lambda command: {"command": command, "description": "Take the next step"},
    "bash": lambda command: {"command": command, "description": "Take the next step"},
    "exec_command": lambda command: {"cmd": command},
}
"""The arguments of a command, by the name of the tool that runs it: Claude Code's, OpenCode's and Codex's."""
IN_NAMESPACE = "multi_agent_v1__close_agent"


def write_model(directory: Path) -> Path:
    """Write a model without weights whose template takes tools, and whose tokens are bytes."""
    write_strange_model(directory, vocab_size=258, max_position_embeddings=1 << 20, eos_token_id=257)
    tokens = [*sorted(ByteLevel.alphabet()), "<|im_start|>", "<|im_end|>"]
    bytes_alone = byte_level_bpe(tokens=tokens, merges=[], kinds=[1] * 256 + [3] * 2, pre="gpt-2")
    bytes_alone.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def say(text: str) -> str:
    """Return the model's answer to a conversation, all of it although the text may have a part of it."""
    prompt = text.rpartition("<|im_start|>assistant\n")[0]
    names = {json.loads(line)["function"]["name"] for line in _tools(prompt)}
    turn = 1 + max((int(number) for number in re.findall(r"STEP-(\d+)-DONE", prompt)), default=0)
    for name, arguments in COMMANDS.items():
        if name in names and turn <= TURNS:
            calls = [{"name": name, "arguments": arguments(f"printf 'STEP-%d-DONE\\n' {turn}")}]
            if turn == IN_NAMESPACE_AT and IN_NAMESPACE in names:
                calls.insert(0, {"name": IN_NAMESPACE, "arguments": {"target": "none"}})
            return f"Step {turn} is next." + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    return "ALL STEPS ARE DONE." if names else "A title"


def _tools(prompt: str) -> list[str]:
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    return [] if found is None else found[1].splitlines()


def _names(tokens: list[int]) -> list[int]:
    """Return the names of all whole blocks, each of which covers those before it."""
    names = [0]
    for begin in range(0, len(tokens) - BLOCK + 1, BLOCK):
        names.append(hash((names[-1], *tokens[begin : begin + BLOCK])))
    return names[1:]


class Scripted:
    """The answers of one server, and its cache of prefixes."""

    def __init__(self, model: Path, log: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._log = log
        self._blocks: set[int] = set()

    def answer(self, body: dict[str, Any]) -> Pieces:
        """Yield an answer's events. An answer that another server began is continued."""
        tokens = list(body["token_ids"])
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        said = text.rpartition("<|im_start|>assistant\n")[2]
        whole = say(text)
        assert whole.startswith(said), (said, whole)
        left = self._tokenizer.encode(whole[len(said) :], add_special_tokens=False).ids
        names = _names(tokens)
        cached = BLOCK * next((place for place, name in enumerate(names) if name not in self._blocks), len(names))
        self._blocks.update(names)
        self._note(prompt=tokens, cached=cached, tools=len(_tools(text)), resumed=bool(said), text=text)
        for made, token in enumerate(left):
            yield event([token])
            if made == len(left) // 2 and f"Step {STANDS_STILL_AT} " in whole and not said:
                self._note(stands_still=True)
                time.sleep(60)
        yield event([END], "stop")
        sequence = [*tokens, *left, END]
        self._blocks.update(_names(sequence))
        self._note(answer=left)
        yield usage(cached)
        yield DONE

    def _note(self, **said: Any) -> None:
        with self._log.open("a") as log:
            log.write(json.dumps({"pid": os.getpid(), **said}) + "\n")


if __name__ == "__main__":
    stub = StubVllm(Scripted(Path(sys.argv[1]), Path(sys.argv[2])).answer)
    print(stub.url, flush=True)
    while True:
        time.sleep(3600)
