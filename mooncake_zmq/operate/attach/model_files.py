"""Finds the tokenizer and chat template of a server's model on this machine, and checks that they are the server's."""

from collections.abc import Sequence
from pathlib import Path

from mooncake_zmq.engine.described import describe
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.tokenizer import open_tokenizer
from mooncake_zmq.operate.attach.server import TESTED_TEXT, Server, tokens_of
from mooncake_zmq.vllm.weights import local_copy

OPTION = "give its directory by --model DIR (config.json, tokenizer.json and the chat template are enough)"


def find(servers: Sequence[Server], name: str, given: str | None) -> Path:
    """Return the directory of the model: `given` by the user, or the first of the servers' own that is here. Raises ModelError
    in one line, also where its tokenizer is not that of every server. `name`: that of the model at the servers."""
    wanted = list(dict.fromkeys(server.root for server in servers)) if given is None else [given]
    found = [directory for each in wanted if (directory := local_copy(each)) is not None and directory.is_dir()]
    if not found:
        what = f"neither a directory of this machine nor a name in its Hugging Face cache: {OPTION}"
        raise ModelError(f"the model {', '.join(wanted)} is {what}")
    try:
        texts, _ = describe(str(found[0]), "", name)
    except ModelError as error:
        raise ModelError(f"{error}; another directory: {OPTION}") from error
    own = open_tokenizer(texts).encode(TESTED_TEXT, special=False).tolist()
    for server in servers:
        if tokens_of(server.url, name, TESTED_TEXT) not in (None, own):
            raise ModelError(f"the tokenizer in {found[0]} is not that of {server.url}: {OPTION}")
    return found[0].resolve()
