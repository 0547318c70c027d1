"""HTTPX's calls with one TLS context for all: a context of its own costs each call 20 ms of CPU, which polling tests would take
from the cluster that they wait for."""

import ssl
from functools import partial

import httpx

TRUST = ssl.create_default_context()

get = partial(httpx.get, verify=TRUST)
post = partial(httpx.post, verify=TRUST)
request = partial(httpx.request, verify=TRUST)
stream = partial(httpx.stream, verify=TRUST)
Client = partial(httpx.Client, verify=TRUST)
