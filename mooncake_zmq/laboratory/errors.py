"""The one error of the laboratory that its user can correct."""

from mooncake_zmq.refused import Refused


class StudyError(Refused):
    """A trace, a profile or a setup that cannot be run; in one line."""
