"""In vLLM's own Python: our connector over a pool whose loads take longer than this machine could ever compute."""

import time
from typing import Any

from mooncake_zmq.vllm import connector

LOAD_S = 3.0


class SlowConnector(connector.MooncakeZmqConnector):
    """Each load takes LOAD_S."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        mover: Any = self._moving._mover
        fetch = mover._fetch

        def slow(*arguments: Any) -> Any:
            time.sleep(LOAD_S)
            return fetch(*arguments)

        mover._fetch = slow
