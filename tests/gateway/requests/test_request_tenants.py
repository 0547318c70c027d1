"""Limits by the clock that the test holds, and lines of the file that cannot be followed."""

from dataclasses import replace

import pytest

from mooncake_zmq.gateway.requests.tenants import Limited, Tenant, Tenants, TenantsError, digest_of, parse

DIGEST = digest_of("secret")


def only(**limits):
    tenant = Tenant(name="alice", digest=DIGEST, **limits)
    return Tenants([tenant], slots=8), tenant


def limited(action, *arguments):
    with pytest.raises(Limited) as caught:
        action(*arguments)
    return caught.value.retry_after_s


def test_a_key_is_known_by_its_hash_alone():
    tenants, tenant = only()
    assert tenants.of("secret") == tenant
    for other in ("", "secre", "secret ", DIGEST):
        assert tenants.of(other) is None


def test_calls_a_minute_are_spread_over_it():
    tenants, tenant = only(requests=6)
    for _ in range(6):
        tenants.begin(0.0, tenant)
    assert limited(tenants.begin, 0.0, tenant) == pytest.approx(10)
    assert limited(tenants.begin, 9.0, tenant) == pytest.approx(1)
    tenants.begin(10.0, tenant)
    for _ in range(6):  # never more than a minute's at once
        tenants.begin(1000.0, tenant)
    assert limited(tenants.begin, 1000.0, tenant) == pytest.approx(10)


def test_clients_may_leave_so_many_calls_a_second():
    tenants, tenant = only(hangups=4)
    for _ in range(4):
        tenants.begin(10.0, tenant)
        tenants.hung_up(10.0, tenant)
    tenants.begin(10.0, tenant)
    tenants.hung_up(10.0, tenant)
    assert limited(tenants.begin, 10.0, tenant) == pytest.approx(0.25)
    tenants.begin(10.25, tenant)


def test_where_any_number_may_be_left_none_is_counted():
    tenants, tenant = only(hangups=0)
    for _ in range(1000):
        tenants.begin(0.0, tenant)
        tenants.hung_up(0.0, tenant)


def test_tokens_not_used_come_back():
    tenants, tenant = only(tokens=600)
    tenants.take(0.0, tenant, 1, 500)
    assert limited(tenants.take, 0.0, tenant, 1, 500) == pytest.approx(40)
    tenants.give_back(0.0, tenant, 1, 400)
    tenants.take(0.0, tenant, 1, 500)
    assert tenants.slots_taken == 1


def test_a_call_that_is_larger_than_a_minutes_tokens_waits_for_all_of_them():
    tenants, tenant = only(tokens=600)
    tenants.take(0.0, tenant, 1, 1200)
    assert limited(tenants.take, 0.0, tenant, 1, 1) == pytest.approx(60.1)
    tenants.take(120.0, tenant, 1, 1200)


def test_a_share_of_the_slots_is_at_least_one():
    tenants, tenant = only(share=0.01)
    tenants.take(0.0, tenant, 1, 1)
    assert limited(tenants.take, 0.0, tenant, 1, 1) is None
    tenants.give_back(0.0, tenant, 1, 0)
    tenants.take(0.0, tenant, 1, 1)


def test_one_tenant_does_not_wait_for_another():
    one, other = (Tenant(name=name, digest=digest_of(name), requests=1, share=0.5) for name in ("one", "other"))
    tenants = Tenants([one, other], slots=2)
    for tenant in (one, other):
        tenants.begin(0.0, tenant)
        tenants.take(0.0, tenant, 1, 1)
    assert limited(tenants.begin, 0.0, one)


def test_who_stays_in_the_file_keeps_what_is_left():
    tenants, tenant = only(requests=1, share=1.0)
    tenants.begin(0.0, tenant)
    tenants.take(0.0, tenant, 8, 0)
    tenants.replace([tenant])
    assert limited(tenants.begin, 0.0, tenant)
    tenants.replace([])
    assert tenants.of("secret") is None
    tenants.give_back(0.0, tenant, 8, 0)
    assert tenants.slots_taken == 0


def test_salts_of_two_tenants_differ_whatever_they_wish():
    one, other = (Tenant(name=name, digest=DIGEST) for name in ("a", "b"))
    assert len({each.salt(wish) for each in (one, other) for wish in ("", "b/", "a/")}) == 6


def test_holders_of_a_name_with_other_salts_share_nothing_whatever_they_wish():
    holders = [Tenant(name="a", digest=DIGEST, own_salt=salt) for salt in ("", "1", "2")]
    assert len({each.salt(wish) for each in holders for wish in ("", "a@1/", "@1/", "1/")}) == 12


def test_a_line_is_read_as_it_is_written():
    tenant = Tenant(name="alice", digest=DIGEST, requests=60, tokens=1000, share=0.25, role="admin", priority=-5, slo="own")
    tenant = replace(tenant, own_salt="0a1b")
    plain = Tenant(name="bob", digest=DIGEST)
    assert parse(f"# names\n\n{tenant.line()}\n{plain.line()}\n") == (tenant, plain)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice:secret",
        f"Alice:{DIGEST}",
        f"alice:{DIGEST}:requests=many",
        f"alice:{DIGEST}:requests=-1",
        f"alice:{DIGEST}:share=0",
        f"alice:{DIGEST}:share=nan",
        f"alice:{DIGEST}:role=root",
        f"alice:{DIGEST}:priority=1",
        f"alice:{DIGEST}:priority=-1001",
        f"alice:{DIGEST}:slo=any",
        f"alice:{DIGEST}:name=bob",
        f"alice:{DIGEST}:own_salt=a",
        f"alice:{DIGEST}:salt=a/b",
        f"alice:{DIGEST}:salt={'a' * 33}",
        f"alice:{DIGEST}\nalice:{DIGEST}",
    ],
)
def test_a_line_that_is_none_is_named(line):
    with pytest.raises(TenantsError, match=f"line {line.count(chr(10)) + 1}: "):
        parse(line)
