"""A stand-in for a vLLM server: `answer(body)` gives the pieces of an answer's stream."""

import json
import select
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Pieces = Iterator[bytes]


def event(
    tokens: list[int] | None = None,
    finish: str | None = None,
    logprobs: Any = None,
    *,
    versions: list[dict[str, Any]] | None = None,
    **more: Any,
) -> bytes:
    """Return an event of vLLM's. `versions`: of the weights that made all tokens, in the last one."""
    choice = {"index": 0, "token_ids": tokens, "finish_reason": finish, "logprobs": logprobs, "weight_versions": versions}
    choices = [] if tokens is None else [choice]
    return b"data: " + json.dumps({"request_id": "r", "choices": choices, **more}).encode() + b"\n\n"


def usage(cached: int, prompt: int = 9) -> bytes:
    return event(usage={"prompt_tokens": prompt, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": cached}})


DONE = b"data: [DONE]\n\n"


class StubVllm:
    """Serves on 127.0.0.1 until `close`."""

    def __init__(self, answer: Callable[[dict[str, Any]], Pieces] = lambda body: iter((event([1], "length"), DONE))) -> None:
        self.answer = answer
        self.status = 200
        self.well = 200
        self.headers: dict[str, str] = {}
        """Further headers of whole answers."""
        self.pages: dict[str, tuple[int, bytes]] = {}
        """Status and content by path, in place of the models."""
        self.posts: dict[str, tuple[int, bytes] | Callable[[dict[str, Any]], tuple[int, bytes]]] = {}
        """Status and content by path, or what makes them of a body, in place of an answer."""
        self.scored: bytes | None = None
        """The whole answer to a request for the logprobs of a prompt."""
        self.asked: list[dict[str, Any]] = []
        self.chunked = False
        """Whether streams are in chunks on a connection that is kept, as vLLM's are."""
        self.ends = True
        """Whether a stream in chunks ends after its last piece."""
        self.connections = 0
        self.running = 0
        self.hung_up = 0
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                stub.connections += 1
                super().setup()

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

            def do_GET(self) -> None:
                if self.path == "/health":
                    return self.whole(stub.well, b"")
                if self.path in stub.pages:
                    return self.whole(*stub.pages[self.path])
                return self.whole(200, json.dumps({"data": [{"id": "m", "max_model_len": 1 << 20}]}).encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if (post := stub.posts.get(self.path)) is not None:
                    return self.whole(*(post(body) if callable(post) else post))
                if stub.scored is not None and "prompt_logprobs" in body.get("sampling_params", {}):
                    stub.asked.append(body)
                    return self.whole(200, stub.scored)
                if stub.status != 200 or not body.get("stream"):
                    return self.whole(stub.status, b'{"error": "as the test wants it"}')
                stub.serve(self, body)
                return None

            def whole(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                for header in stub.headers.items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(content)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda request, address: None  # a client may hang up at any time
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def serve(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self._lock:
            self.asked.append(body)
            self.running += 1
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header(*(("transfer-encoding", "chunked") if self.chunked else ("connection", "close")))
        handler.end_headers()
        handler.close_connection = not self.chunked
        try:
            for piece in self.answer(body):
                if select.select([handler.connection], [], [], 0)[0]:
                    raise BrokenPipeError
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
            if self.chunked and self.ends:
                handler.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.hung_up += 1
        finally:
            with self._lock:
                self.running -= 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
