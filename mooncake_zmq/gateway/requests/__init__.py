"""The gateway's actor, which owns requests, with its records of them and of the cluster."""
