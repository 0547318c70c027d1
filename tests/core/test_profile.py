"""Costs from measurements."""

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted_profile import COSTS, LENGTHS, planted

from mooncake_zmq.core.profile import Fitted, PrefillTime, ProfileError, StepTime, decode, encode, fit


@given(
    st.builds(
        Fitted,
        prefill_token_s=st.floats(1e-6, 1e-2),
        prefill_square_s=st.floats(1e-10, 1e-6),
        decode_step_s=st.floats(1e-4, 1.0),
        decode_request_s=st.floats(1e-5, 0.1),
        decode_context_s=st.floats(1e-8, 1e-4),
    )
)
def test_a_fit_recovers_planted_costs(costs):
    fitted = fit(planted(costs))
    for name in Fitted.__struct_fields__:
        assert getattr(fitted, name) == pytest.approx(getattr(costs, name), rel=1e-3), name


def test_measurements_that_are_off_move_the_fit_by_no_more():
    fitted, true = fit(planted(noise=0.05)).costs, COSTS.costs
    assert fitted.compute_s(1536, 512) == pytest.approx(true.compute_s(1536, 512), rel=0.06)
    assert fitted.step_s(8, 4096) == pytest.approx(true.step_s(8, 4096), rel=0.06)


def test_a_cost_that_would_be_negative_is_none():
    """Longer contexts that happened to be quicker."""
    decode = tuple(StepTime(t.batch, 1152 - t.context, t.seconds) for t in planted().decode)
    fitted = fit(planted(decode=decode))
    assert fitted.decode_context_s == 0
    assert fitted.decode_step_s > 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"prefill": (PrefillTime(64, 0, 0.1), PrefillTime(64, 0, 0.2))}, "too few measurements"),
        ({"decode": (StepTime(1, 128, 0.1), StepTime(1, 1024, 0.2))}, "too few measurements"),
        ({"prefill": tuple(PrefillTime(n, 0, 1e-9 * n**3) for n in LENGTHS)}, "do not grow"),
        ({"decode": tuple(StepTime(t.batch, t.context, 1e-6 * t.batch**3) for t in planted().decode)}, "no fixed part"),
    ],
)
def test_measurements_that_give_no_costs_are_refused(changes, complaint):
    with pytest.raises(ProfileError, match=complaint):
        fit(planted(**changes))


def test_a_profile_reads_as_it_was_written():
    assert decode(encode(planted())) == planted()


def test_a_profile_of_an_earlier_format_is_to_be_measured_again():
    fields = msgspec.json.decode(encode(planted()))
    del fields["backend"]
    with pytest.raises(ProfileError, match="format 1, and this version reads 2: measure again"):
        decode(msgspec.json.encode(fields | {"format": 1}))


@given(st.binary(max_size=200), st.integers(0, 2000), st.booleans())
def test_any_bytes_are_a_profile_or_one_error(junk, at, cut):
    whole = encode(planted())
    damaged = whole[:at] if cut else whole[:at] + junk + whole[at + len(junk) :]
    for content in (junk, damaged):
        with suppress(ProfileError):
            decode(content)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        (b'"format": 2', b'"format": 3', "format 3"),
        (b'"threads": 1', b'"threads": 0', r">= 1 - at \$.threads"),
        (b'"seconds": ', b'"seconds": -', r"\$.prefill"),
        (b'"machine"', b'"machin"', "machin"),
    ],
)
def test_a_damaged_profile_says_where(old, new, complaint):
    assert old in encode(planted())
    with pytest.raises(ProfileError, match=complaint):
        decode(encode(planted()).replace(old, new))
