"""A worker process of the laboratory: see jobs.py."""

from mooncake_zmq.laboratory.jobs import work

work()
