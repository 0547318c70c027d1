"""Progress of a long command on standard error: a bar on a terminal, elsewhere a line each minute."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EACH_S = 60.0
"""The time between two lines where no terminal shows a bar."""


class ProgressDisplay:
    """Shows how far one command is. Threads may share it."""

    def __init__(self, console: Console, bar: Progress, text: str) -> None:
        self._console = console
        self._bar = bar
        self._task = bar.add_task(text, total=1.0)
        self._began = self._shown = time.monotonic()
        self._lock = Lock()

    def show(self, share: float, text: str) -> None:
        """Show which share of the work is done, as a text says it."""
        self._bar.update(self._task, completed=share, description=text)
        if self._console.is_terminal:
            return
        with self._lock:
            now = time.monotonic()
            if now - self._shown < LINE_EACH_S:
                return
            self._shown = now
        self.say(f"{text}, {share:.0%}{_left(now - self._began, share)}")

    def say(self, line: str) -> None:
        """Print a line at once, above the bar if there is one."""
        self._bar.console.out(line, highlight=False)


@contextmanager
def progress_display(text: str) -> Iterator[ProgressDisplay]:
    """Yield the display of a command that begins now."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield ProgressDisplay(console, bar, text)


def elapsed_lines() -> Callable[[str], None]:
    """Return a function that prints a line on standard error, behind the time since now."""
    began, errors = time.monotonic(), Console(stderr=True, highlight=False)
    return lambda text: errors.print(f"[dim]{time.monotonic() - began:6.1f} s[/] {escape(text)}", soft_wrap=True)


def _left(elapsed_s: float, share: float) -> str:
    """Return how long the rest takes if it goes on like this."""
    if share <= 0.0:
        return ""
    minutes = math.ceil(elapsed_s / share * (1.0 - share) / 60)
    return f"; about {minutes} min left"
