"""The error that a user can act on: one line that says what is wrong with a model and what to do."""

from mooncake_zmq.refused import Refused


class ModelError(Refused):
    """A model or its tokenizer cannot be obtained, read or used."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split("\n")))  # the text may quote a library's error, or a file


class TemplateFailed(ValueError):
    """The model's chat template refused these messages, or tried something the sandbox forbids."""
