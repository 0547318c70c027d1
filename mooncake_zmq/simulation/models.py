"""The models and adapters of simulated clusters: who asks for which, and which vLLM has which."""

from collections.abc import Mapping

MODEL = "simulated"
"""The model of a cluster that has one, and the first of several."""
ADAPTERS: Mapping[str, tuple[str, ...]] = {
    "": ("poet", "sql"),
    MODEL: tuple(f"adapter-{number}" for number in range(1, 8)),
    "other": tuple(f"adapter-{number}" for number in range(1, 8)),
    "third": tuple(f"adapter-{number}" for number in range(1, 7)),
}
"""The adapters of the only model, and of each of several. 20 in all have names that are those of another model's too."""
MODELS = tuple(model for model in ADAPTERS if model)
Computes = tuple[str, str]
"""A model (empty: the only one) and an adapter of it (empty: none), which compute an answer."""
OF_ONE: tuple[Computes, ...] = (("", ""), ("", ""), *(("", adapter) for adapter in ADAPTERS[""]))
"""The choices of chats where vLLMs compute alone: half of them ask for no adapter."""
OF_SEVERAL: tuple[Computes, ...] = tuple((model, adapter) for model in MODELS for adapter in ("", "", *ADAPTERS[model]))
"""The choices of chats where there are several models."""


def adapters_of(name: str, model: str) -> tuple[str, ...]:
    """Return the adapters that the vLLM beside a node has; those of one host lack the last."""
    return ADAPTERS[model][:-1] if name.startswith("vllm-a") else ADAPTERS[model]


def weights(computes: Computes) -> str:
    """Return a name for the weights that compute an answer; empty for those of the first model without an adapter."""
    model, adapter = computes
    return adapter if model in ("", MODEL) else f"{model} {adapter}"
