"""Structured logs on stderr: JSON lines for machines, or a console form for people."""

import logging
import sys
import traceback
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from mooncake_zmq.runtime import log_file

LogFormat = Literal["json", "console"]
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_ERROR_CHARS = 200
"""Of an exception's text: it may quote what a client sent."""


def configure(*, node: str, role: str, form: LogFormat, level: str) -> None:
    """Set up structlog for this process; every line says which node and role wrote it. Exceptions are told with their frames
    and never with what stood in the variables there: prompts, keys. The next line that can be written tells how many before it
    could not be."""
    lines = log_file.stderr()

    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not contextvars: those do not reach worker threads.
        event["node"], event["role"] = node, role
        if lines.lost:
            event["lost_lines"] = lines.lost
        return event

    last: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(_told), structlog.processors.JSONRenderer()]
        if form == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write)]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            name_process,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, lines)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Libraries()], force=True)


class _Libraries(logging.Handler):
    """What libraries have to say, as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:MAX_ERROR_CHARS]
        structlog.get_logger().log(record.levelno, "library", logger=record.name, text=text, exc_info=record.exc_info)


_frames_told = ExceptionDictTransformer(show_locals=False)


def _told(exc_info: ExcInfo) -> list[dict[str, Any]]:
    return _clipped(_frames_told(exc_info))


def _clipped(stacks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for stack in stacks:
        stack["exc_value"] = stack["exc_value"][:MAX_ERROR_CHARS]
        stack["exceptions"] = [_clipped(inner) for inner in stack.get("exceptions", ())]
    return stacks


def _write(output: TextIO, exc_info: ExcInfo) -> None:
    for text in traceback.format_exception(*exc_info):
        for line in text.splitlines():
            output.write(f"\n{line[:MAX_ERROR_CHARS]}")
