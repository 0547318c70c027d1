"""Structured logs on stderr: JSON lines for machines, or a console form for people."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TextIO, cast

import structlog
from structlog.typing import EventDict, ExcInfo, WrappedLogger

from mooncake_zmq.telemetry import log_file

LogFormat = Literal["json", "console"]
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
MAX_ERROR_CHARS = 200
MAX_FRAMES, MAX_CHAINED, MAX_GROUPED = 50, 8, 8
"""The most frames of an exception, exceptions of a chain and exceptions of a group in one line."""
SAFE = (OSError, ImportError, MemoryError)
SAFE_MODULES = (
    "mooncake_zmq.config",
    "mooncake_zmq.core.keys",
    "mooncake_zmq.core.profile",
    "mooncake_zmq.engine.errors",
    "mooncake_zmq.pool.ssd",
    "mooncake_zmq.runtime.listening",
    "mooncake_zmq.transfer",
    "sqlite3",
    "zmq",
)
"""Modules whose exceptions concern the machine or the operator. Those of other modules may quote a prompt, an answer or a
key."""


def configure(*, node: str, role: str, form: LogFormat, level: str) -> None:
    """Set up structlog for this process; every line names its node and role. Exceptions are written with type and frames,
    never with the values of variables, and with their text only where that cannot quote a prompt or a key (`SAFE`,
    `SAFE_MODULES`). After lines that could not be written, the next one contains their number."""
    lines = log_file.stderr()

    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not contextvars: those do not reach worker threads.
        event["node"], event["role"] = node, role
        if lines.lost:
            event["lost_lines"] = lines.lost
        return event

    last: list[structlog.typing.Processor] = (
        [structlog.processors.ExceptionRenderer(_exceptions), structlog.processors.JSONRenderer()]
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


@contextmanager
def logs_from(level: int) -> Iterator[None]:
    """Drop log lines below `level`, one of the logging module's, and send the others to standard error, as standard output is
    a command's report."""
    before = structlog.get_config()
    wrapper = structlog.make_filtering_bound_logger(level)
    structlog.configure(wrapper_class=wrapper, logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    try:
        yield
    finally:
        structlog.configure(**before)


class _Libraries(logging.Handler):
    """Writes records of libraries as lines of this log, with only the first line of their text, as asyncio quotes exceptions
    below it."""

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            record.args = tuple(_named(each) if isinstance(each, BaseException) else each for each in record.args)
        text = record.getMessage().partition("\n")[0][:MAX_ERROR_CHARS]
        structlog.get_logger().log(record.levelno, "library", logger=record.name, text=text, exc_info=record.exc_info)


def _exceptions(exc_info: ExcInfo) -> list[dict[str, Any]]:
    """Return the exception, followed by those that caused it."""
    return [_stack(error, is_cause) for error, is_cause in _chain(exc_info[1])]


def _chain(error: BaseException) -> Iterator[tuple[BaseException, bool]]:
    is_cause = False
    for _ in range(MAX_CHAINED):
        yield error, is_cause
        is_cause = error.__cause__ is not None
        before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if before is None:
            return
        error = before


def _stack(error: BaseException, is_cause: bool) -> dict[str, Any]:
    frames = [
        {"filename": code.co_filename, "lineno": line, "name": code.co_name}
        for code, line in ((frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__))
    ]
    grouped = error.exceptions[:MAX_GROUPED] if isinstance(error, BaseExceptionGroup) else ()
    return {
        "exc_type": type(error).__name__,
        "exc_value": _text(error),
        "is_cause": is_cause,
        "frames": frames[-MAX_FRAMES:],
        "exceptions": [[_stack(each, is_cause=False)] for each in grouped],
    }


def _text(error: BaseException) -> str:
    """Return the text of an exception; empty if it may quote what a client sent."""
    kind = type(error)
    is_safe = any(f"{kind.__module__}.".startswith(f"{module}.") for module in SAFE_MODULES)
    if kind.__module__ == "builtins":
        is_safe = isinstance(error, SAFE)
    return str(error)[:MAX_ERROR_CHARS] if is_safe else ""


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_text(error)}".removesuffix(": ")


def _write(output: TextIO, exc_info: ExcInfo) -> None:
    for error, _ in reversed([*_chain(exc_info[1])]):
        for frame, line in [*traceback.walk_tb(error.__traceback__)][-MAX_FRAMES:]:
            output.write(f'\n  File "{frame.f_code.co_filename}", line {line}, in {frame.f_code.co_name}')
        output.write(f"\n{_named(error)}")
        for each in error.exceptions[:MAX_GROUPED] if isinstance(error, BaseExceptionGroup) else ():
            _write(output, (type(each), each, each.__traceback__))
