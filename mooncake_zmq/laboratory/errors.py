"""The one error of the laboratory that its user can correct."""


class StudyError(Exception):
    """A trace, a profile or a setup that cannot be run; in one line."""
