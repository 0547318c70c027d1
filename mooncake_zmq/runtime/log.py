"""Structured logs on stderr: JSON lines for machines, or a console form for people."""

import sys
from typing import Literal

import structlog
from structlog.typing import EventDict, WrappedLogger

LogFormat = Literal["json", "console"]
LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


def configure(*, node: str, role: str, form: LogFormat, level: str) -> None:
    """Set up structlog for this process; every line says which node and role wrote it."""

    def name_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        # Not contextvars: those do not reach worker threads.
        event["node"], event["role"] = node, role
        return event

    last: list[structlog.typing.Processor] = (
        [structlog.processors.dict_tracebacks, structlog.processors.JSONRenderer()]
        if form == "json"
        else [structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            name_process,
            *last,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
