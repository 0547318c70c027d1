"""The one error of commands whose arguments, files or machine are not as they must be."""

import click


class Refused(click.ClickException):
    """Ends a command before it has a result. The message is one line, and the exit code 2: 1 is for results that are bad."""

    exit_code = 2
