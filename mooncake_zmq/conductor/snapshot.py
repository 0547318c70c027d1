"""The state of a conductor for metrics and dumps; this changes nothing. PURE."""

from dataclasses import dataclass

from mooncake_zmq.conductor.balance import Balance
from mooncake_zmq.conductor.bookings import Bookings
from mooncake_zmq.conductor.copies import Copies
from mooncake_zmq.conductor.decodes import Decodes
from mooncake_zmq.conductor.inventory import Inventory
from mooncake_zmq.conductor.membership import Membership
from mooncake_zmq.conductor.prefills import Prefills
from mooncake_zmq.conductor.settings import ConductorSettings
from mooncake_zmq.core.roles import ROLES

DUMPED_BOOKINGS = 100
DUMPED_CHAINS = 50


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Reads the components of one conductor."""

    settings: ConductorSettings
    members: Membership
    prefills: Prefills
    decodes: Decodes
    inventory: Inventory
    bookings: Bookings
    copies: Copies
    balance: Balance

    def gauges(self, now: float) -> dict[str, float]:
        """Return gauges for metrics."""
        coming = sum(booking.choices for node in self.decodes.nodes for booking in node.coming if not booking.reserved)
        known = [node.load for node in self.decodes.nodes if node.load is not None]
        return {
            "bookings": len(self.bookings),
            "queued_prefill_s": sum([node.queued_s(now) for node in self.prefills.nodes]),
            "decode_requests": sum(load.running + load.reserved for load in known) + coming,
            "cached_keys": len(self.inventory.index),
            "cached_copies": sum(self.inventory.index.counts.values()),
            "capacity_keys": self.settings.max_keys,
            "capacity_prefills": sum([not node.spare for node in self.prefills.nodes]),
            "capacity_decodes": sum([not (node.spare or node.lends_only) for node in self.decodes.nodes]),
            "capacity_cache_nodes": len(self.members.of_role("cache-node")),
            **self.balance.gauges(now),
        }

    def dump(self, now: float) -> dict[str, object]:
        """Return the state, ready for JSON, with the first bookings only."""
        return {
            "members": [
                {"name": m.name, "role": m.role, "host": m.host, "incarnation": m.incarnation}
                for role in ROLES
                for m in self.members.of_role(role)
            ],
            "prefills": self._prefills(now),
            "decodes": self._decodes(),
            "index": {"keys": len(self.inventory.index), "by_node": self.inventory.index.counts},
            "replication": {
                "under_way": self.copies.replication.under_way(now),
                "recent": self.copies.recent.dump(self.inventory.index, DUMPED_CHAINS),
            },
            "balance": self.balance.dump(now),
            "bookings": [
                {
                    "gateway": booking.key[0],
                    "request_id": booking.key[1],
                    "attempt": booking.placed.attempt,
                    "prefill": booking.placed.prefill,
                    "decode": booking.placed.decode,
                    "age_s": now - booking.at,
                    "due_s": booking.due - now,
                }
                for booking in self.bookings.all()[:DUMPED_BOOKINGS]
            ],
        }

    def _prefills(self, now: float) -> dict[str, object]:
        return {
            node.name: {
                "queue_s": node.queued_s(now),
                "jobs": len(node.ends),
                "compute_factor": node.factor,
                "load_factor": node.load.factor,
                "bookings": len(node.unseen),
                "draining": node.draining,
            }
            for node in self.prefills.nodes
        }

    def _decodes(self) -> dict[str, object]:
        return {
            node.name: {
                "batch": node.there + node.coming_requests,
                "step_s": node.step_s,
                "step_factor": node.scale,
                "free_tokens": None if node.load is None else node.free,
                "bookings": len(node.coming),
                "draining": node.draining,
            }
            for node in self.decodes.nodes
        }
