"""Finds the configuration files that come with the project."""

from pathlib import Path

LOCAL = "configs/local.toml"
TOY = "configs/toy.toml"
MODELLED = "configs/modelled.toml"
CHAOS = "configs/chaos.toml"
VLLM = "configs/vllm.toml"
ROOT = Path(__file__).parent.parent.parent


def located(path: str | Path) -> str:
    """Return `path`, or the project's own file of this name if the current directory has none."""
    own = ROOT / path
    return str(own) if str(path).startswith("configs/") and not Path(path).exists() and own.exists() else str(path)
