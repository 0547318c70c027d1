"""A profile as an engine of known costs would give it."""

from mooncake_zmq.conductor.profile import Costs, PrefillTime, Profile, StepTime

LENGTHS, PREFIXES = (64, 512, 2048), (0, 1024)
BATCHES, CONTEXTS = (1, 4, 16), (128, 1024)
COSTS = Costs(prefill_token_s=2e-3, prefill_square_s=4e-7, decode_step_s=0.03, decode_slope=0.1, decode_context_slope=2e-4)


def planted(costs: Costs = COSTS, noise: float = 0.0, **changes) -> Profile:
    """What an engine of these costs would be measured as; `noise`: every other time is off by that share, up or down."""
    wobble = [1 + noise, 1 - noise]
    prefill = [PrefillTime(n, p, costs.prefill_s(n, p)) for n in LENGTHS for p in PREFIXES]
    steps = [StepTime(b, c, costs.step_s(b, c)) for b in BATCHES for c in CONTEXTS]
    fields = {
        "model": "default",
        "fingerprint": "f" * 32,
        "threads": 1,
        "backend": "numpy",
        "machine": "planted",
        "prefill": tuple(PrefillTime(t.tokens, t.prefix, t.seconds * wobble[i % 2]) for i, t in enumerate(prefill)),
        "decode": tuple(StepTime(t.batch, t.context, t.seconds * wobble[i % 2]) for i, t in enumerate(steps)),
    }
    return Profile(**fields | changes)
