"""Where a command writes: a terminal as wide as it is, or a pipe, whose lines are as long as they need to be."""

import os
import sys

from rich.console import Console

PIPE_WIDTH = 4096
"""No line is folded before: `grep` finds all that belongs to what it looks for."""


class Terminal(Console):
    """Standard output. Where nobody reads it any more the rest is not said (`quiet`), and exit codes stay what they are."""

    def __init__(self) -> None:
        super().__init__()
        if not self.is_terminal:
            self.width = PIPE_WIDTH

    def on_broken_pipe(self) -> None:
        """Rich would end the process with 1, which has a meaning of its own."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
