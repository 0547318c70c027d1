"""Sources of weights: a GGUF file, a Hugging Face directory, or random numbers of a shape. They read and never write."""

from mooncake_zmq.engine.sources.dummy import DUMMY_SHAPES, DummySource
from mooncake_zmq.engine.sources.gguf_file import GgufSource
from mooncake_zmq.engine.sources.hugging_face import HuggingFaceSource
from mooncake_zmq.engine.sources.rope import rope_frequencies
from mooncake_zmq.engine.sources.source import Source, StoredTensor, expected_shapes

__all__ = [
    "DUMMY_SHAPES",
    "DummySource",
    "GgufSource",
    "HuggingFaceSource",
    "Source",
    "StoredTensor",
    "expected_shapes",
    "rope_frequencies",
]
