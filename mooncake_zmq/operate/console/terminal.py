"""The output of a command: a terminal of any width, or a pipe, whose lines are never folded."""

import os
import sys

from rich.console import Console

PIPE_WIDTH = 4096
"""The width of lines in a pipe: none is folded below it, so `grep` finds whole lines."""


class Terminal(Console):
    """Standard output. Once its reader has closed it, the remaining output is dropped (`quiet`), and exit codes stay the
    same."""

    def __init__(self) -> None:
        super().__init__()
        if not self.is_terminal:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Drop further output: Rich would end the process with 1, which has another meaning here."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
