"""`python -m mooncake_zmq`."""

from mooncake_zmq.cli import main

main()
