"""A worker process of the laboratory: see jobs.py."""

from mooncake_zmq.native import mypyc_code


def main() -> None:
    """Do a job, in machine code if available."""
    mypyc_code.use(mypyc_code.LABORATORY)
    from mooncake_zmq.laboratory.jobs import work

    work()


main()
