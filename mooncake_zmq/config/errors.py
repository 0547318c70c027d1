"""The error of a mistaken configuration."""

from mooncake_zmq.refused import Refused


class ConfigError(Refused):
    """A mistake in the configuration, in one line that names where it is."""
