"""The floors of the house, from the ground up. A room imports only rooms of lower floors.

A room is a folder of the package, or a module beside the folders. A new room must be given a floor here.
"""

FLOORS: tuple[frozenset[str], ...] = (
    # The ground: what a block is, the version, the extras, and the error of commands.
    frozenset({"__init__", "extras", "kv", "refused"}),
    # Messages, sessions, timers and the cost model; which modules are compiled.
    frozenset({"core", "native"}),
    # The model, and the role that needs nothing but the ground.
    frozenset({"engine", "conductor"}),
    # How bytes move.
    frozenset({"transfer"}),
    # What store clients import; logs and metrics.
    frozenset({"store", "telemetry"}),
    # A host's pool, vLLM's connector to it, and the gateway with HTTP in front of its actor.
    frozenset({"pool", "vllm", "gateway"}),
    # The roles that use a pool.
    frozenset({"prefill", "decode", "vllm_node"}),
    # All roles in one table.
    frozenset({"roles"}),
    # A deployment's settings.
    frozenset({"config"}),
    # What runs the actors: over ZeroMQ, or under a seed.
    frozenset({"runtime", "simulation"}),
    # Operator's commands on a running or planned deployment, and studies in virtual time.
    frozenset({"operate", "laboratory"}),
    # What measures and spoils inputs.
    frozenset({"bench", "fuzz"}),
    # The command line, which names all commands.
    frozenset({"cli"}),
    # What starts whole clusters through the command line, or other programs.
    frozenset({"chaos", "prove", "__main__"}),
)


def floor_by_room(floors: tuple[frozenset[str], ...] = FLOORS) -> dict[str, int]:
    """Each room's floor, counted from the ground."""
    return {room: floor for floor, rooms in enumerate(floors) for room in rooms}
