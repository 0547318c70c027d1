"""The bytes of a deployment's KV, by the shape of its model where that is known on this machine."""

from mooncake_zmq.config.records import Config
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.spec import ModelSpec

UNKNOWN = " of a model such as the default one"
"""The words behind a size where the model is not on this machine."""


def kv_of(config: Config) -> tuple[int, ModelSpec | None]:
    """Return the bytes of a token's KV as it is computed, and the model's shape. Where the model is not on this machine, or
    another program computes it, there is no shape, and the bytes are those of [costs], by default the default model's."""
    from mooncake_zmq.engine.prepare import known_shape  # little else of a configuration needs the model

    try:
        shape = (
            known_shape(config.model.path, config.model.cache_dir, config.model.card) if config.model.engine == "own" else None
        )
    except ModelError:
        shape = None
    return (config.costs.kv_bytes_per_token if shape is None else shape.kv_bytes_per_token), shape
