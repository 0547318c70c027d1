"""The error of a mistaken configuration."""


class ConfigError(Exception):
    """A mistake in the configuration, in one line that names where it is."""
