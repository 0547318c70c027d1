"""Puts this directory on the import path, for the harnesses that several test modules share. Tests take classes apart, which
machine code does not allow: they run the sources."""

import os

from hypothesis import settings

os.environ["MOONCAKE_ZMQ_MYPYC"] = "0"

settings.register_profile("timeless", deadline=None)  # an example's time says how busy the machine is
settings.load_profile("timeless")

pytest_plugins = ["helpers.suites", "helpers.node_logs", "helpers.spread"]
