"""The check that vLLMs load from stores only KV of the same tokens, made by the same model and adapter."""

from collections import Counter
from collections.abc import Iterable, Sequence

from mooncake_zmq.simulation.engine_store import SavedBlock
from mooncake_zmq.simulation.models import Computes
from mooncake_zmq.simulation.violation import Violation


class CrossHits:
    """Compares each block that a vLLM loads with the prompt for which it is loaded."""

    def __init__(self) -> None:
        self.loads: Counter[str] = Counter()

    def loading(self, name: str, computes: Computes, text: bytes, found: Sequence[SavedBlock]) -> None:
        """Check I9: the leading blocks of a prompt that a vLLM loads were made of its tokens, by what computes its answer."""
        for block in found:
            if block.computes != computes:
                raise Violation("I9", f"{name} loads KV of {_named(block.computes)} for a prompt of {_named(computes)}")
            if not text.startswith(block.text):
                raise Violation("I9", f"{name} loads KV of other tokens for a prompt of {_named(computes)}")
        self.loads["blocks"] += len(found)

    def looked(self, computes: Computes, text: bytes, held: Iterable[SavedBlock]) -> None:
        """Count a look for a prompt's blocks while stores hold the same text as others made it: what a wrong key would find."""
        others = {block.computes for block in held if block.computes != computes and text.startswith(block.text)}
        self.loads["looks"] += 1
        self.loads["looks past another adapter's"] += any(model == computes[0] for model, _ in others)
        self.loads["looks past another model's"] += any(model != computes[0] for model, _ in others)


def _named(computes: Computes) -> str:
    model, adapter = computes
    return f"{model or 'the model'} with {adapter}" if adapter else model or "the model"
