"""A profile as an engine of known costs would give it."""

from mooncake_zmq.core.profile import Fitted, PrefillTime, Profile, StepTime

LENGTHS, PREFIXES = (64, 512, 2048), (0, 1024)
BATCHES, CONTEXTS = (1, 4, 16), (128, 1024)
COSTS = Fitted(prefill_token_s=2e-3, prefill_square_s=4e-7, decode_step_s=0.027, decode_request_s=0.0027, decode_context_s=5e-6)


def planted(fitted: Fitted = COSTS, noise: float = 0.0, **changes) -> Profile:
    """What an engine of these costs would be measured as; `noise`: every other time is off by that share, up or down."""
    costs = fitted.costs
    wobble = [1 + noise, 1 - noise]
    prefill = [PrefillTime(n, p, costs.compute_s(p + n, p)) for n in LENGTHS for p in PREFIXES]
    steps = [StepTime(b, c, costs.step_s(b, b * c)) for b in BATCHES for c in CONTEXTS]
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
