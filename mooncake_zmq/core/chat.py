"""How a conversation is written as a prompt by a model's chat template."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ChatForm:
    """How a conversation is written as a prompt."""

    answer: bool = True
    """It ends where an answer begins."""
    continued: bool = False
    """It ends inside its final message, which the model continues."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, by name."""


PLAIN_CHAT = ChatForm()
TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "bos_token", "eos_token")
)
"""Variables of chat templates that other parameters set, or the model."""
