"""A conversation as text by the model's own template, which runs in a sandbox."""

import json
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from mooncake_zmq.core.chat import PLAIN_CHAT, ChatForm
from mooncake_zmq.engine.errors import ModelError, TemplateFailed

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message while the template is rendered, as Hugging Face does."""
_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError, SyntaxError, ValueError)
"""Python's own errors, of a template that is nested too deeply or computes what cannot be computed."""


class ChatTemplate:
    """The template of one model. Safe to share between threads."""

    def __init__(self, template: str, *, bos_token: str = "", eos_token: str = "") -> None:
        """Compile `template`, which may write the two tokens by name. Raises ModelError if it does not parse."""
        self._template = _compile(template)
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}

    def text(
        self, messages: list[dict[str, Any]], form: ChatForm = PLAIN_CHAT, tools: list[dict[str, Any]] | None = None
    ) -> str:
        """Return the text of a conversation. Raises TemplateFailed."""
        if not form.continued:
            return self._rendered(messages, form, tools)
        *before, final = messages
        text = self._rendered([*before, final | {"content": final["content"] + CONTINUED}], form, tools)
        at = text.rfind(CONTINUED.strip())
        if at < 0:
            raise TemplateFailed("the chat template leaves out the final message, so that it cannot be continued")
        # A template that strips messages would have stripped this one.
        return text[:at] if text[at:].startswith(CONTINUED) else text[:at].rstrip()

    def _rendered(self, messages: list[dict[str, Any]], form: ChatForm, tools: list[dict[str, Any]] | None) -> str:
        given = {"messages": messages, "tools": tools or None, "documents": None, "add_generation_prompt": form.answer}
        try:
            return self._template.render({**form.variables, **given, **self._tokens})
        except (jinja2.TemplateError, TypeError, AttributeError, *_ERRORS) as error:
            raise TemplateFailed(f"the chat template refused the messages: {error}") from error


def _compile(template: str) -> jinja2.Template:
    """Compile a template as Hugging Face does, so that templates written for it give the same text here."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    try:
        return environment.from_string(template)
    except (jinja2.TemplateError, *_ERRORS) as error:
        raise ModelError(f"the model's chat template does not parse: {error}") from error


class _Generation(jinja2.ext.Extension):
    """The tag with which templates for training mark the assistant's text; it changes no text."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
