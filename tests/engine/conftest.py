"""Engines to test: the toy, random weights of a small shape, and the default model (converted once per machine)."""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy loads: the engine's products gain nothing from more

from pathlib import Path

import numpy as np
import pytest

from mooncake_zmq.core.costs import Costs
from mooncake_zmq.engine import weights
from mooncake_zmq.engine.errors import ModelError
from mooncake_zmq.engine.modelled import ModelledEngine
from mooncake_zmq.engine.prepare import default_cache_dir, prepare
from mooncake_zmq.engine.tokenizer import byte_tokenizer, open_tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "smollm2.npz"


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory):
    return prepare("dummy:tiny", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def tiny(tiny_path):
    return weights.open_model(tiny_path)


@pytest.fixture(scope="session", params=["toy", "modelled", "tiny", "tiny with 3 threads"])
def engine(request, tiny_path, tiny):
    match request.param:
        case "toy":
            return weights.load_engine("toy")
        case "modelled":
            return ModelledEngine(tiny.spec, Costs(), sleep=lambda seconds: None)
        case "tiny":
            return tiny
    return weights.load_engine(tiny_path, threads=3)


@pytest.fixture(scope="session", params=["qwen2", "qwen3"])
def qwen_path(request):
    """Models with a bias, and with norms of heads."""
    return prepare(f'dummy:{{"layers": 2, "family": "{request.param}"}}', default_cache_dir())


@pytest.fixture(params=["numpy", "compiled", "compiled, 2 threads"])
def qwen(request, qwen_path):
    if request.param == "numpy":
        return weights.open_model(qwen_path)
    try:
        return weights.open_compiled(qwen_path, threads=2 if "2" in request.param else 1, compacted=False)
    except ModelError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="session")
def default_path():
    return prepare("default", default_cache_dir(), backend="auto")  # one download for all backends


@pytest.fixture(scope="session")
def default_model(default_path):
    return weights.open_model(default_path)


@pytest.fixture(scope="session")
def default_tokenizer(default_path):
    return open_tokenizer(default_path)


@pytest.fixture(scope="session", params=["bytes", "smollm2"])
def tokenizer(request):
    return byte_tokenizer() if request.param == "bytes" else request.getfixturevalue("default_tokenizer")


@pytest.fixture(scope="session")
def golden():
    with np.load(GOLDEN, allow_pickle=False) as archive:
        return dict(archive)


@pytest.fixture(scope="session")
def golden_prompts(golden):
    return np.split(golden["prompts"], np.cumsum(golden["prompt_lengths"])[:-1])
