"""Puts this directory on the import path, for the harnesses that several test modules share. Tests take classes apart, which
machine code does not allow: they run the sources."""

import os

os.environ["MOONCAKE_ZMQ_MYPYC"] = "0"

pytest_plugins = ["helpers.suites", "helpers.node_logs", "helpers.spread"]
