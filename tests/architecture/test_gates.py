"""The gates hold for the package, but for the exceptions listed; and each gate finds a planted breach."""

import allowed
import gates
import pytest
from floors import FLOORS, floor_by_room
from gates import EXEMPT_FUNCTIONS, GATES, Found, Gate
from sources import package, room_of, sources_of


def found(gate: str, **modules: str) -> dict[str, int]:
    """What a gate finds in modules of these texts; `kv__slots` is the module `kv/slots`."""
    (chosen,) = (each for each in GATES if each.name == gate)
    breaches = chosen.find(sources_of({name.replace("__", "/"): text for name, text in modules.items()}))
    return {name: breach.number for name, breach in breaches.items()}


def function(lines: int, name: str = "work") -> str:
    return f"def {name}():\n" + "    pass\n" * (lines - 1)


def cls(methods: int) -> str:
    return "class Slots:\n" + "".join(f"    def m{number}(self): ...\n" for number in range(methods))


@pytest.mark.parametrize("gate", GATES, ids=lambda gate: gate.name)
def test_the_package_keeps_to_the_gate_but_for_the_exceptions_listed(gate: Gate) -> None:
    listed = allowed.read(allowed.PATH.read_text(encoding="utf-8"))
    problems = list(allowed.problems(gate.find(package()), listed.get(gate.name, {}), gate.rule))
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


def test_the_list_is_as_its_command_writes_it_and_names_known_gates_only() -> None:
    text = allowed.PATH.read_text(encoding="utf-8")
    listed = allowed.read(text)
    assert allowed.written(listed) == text
    assert listed.keys() <= {gate.name for gate in GATES}


def test_every_room_stands_on_one_floor_and_no_floor_has_a_room_that_is_gone() -> None:
    named = sorted(room for rooms in FLOORS for room in rooms)
    assert named == sorted({room_of(module) for module in package()})


def test_what_may_have_long_functions_is_there_and_imports_numba() -> None:
    for module in EXEMPT_FUNCTIONS:
        assert any(name.split(".")[0] == "numba" for name, _ in package()[module].imports), module


# --- sizes


@pytest.mark.parametrize(("lines", "breaches"), [(450, {}), (451, {"kv/slots:Slots": 451})])
def test_a_class_of_more_than_450_lines_is_found(lines: int, breaches: dict[str, int]) -> None:
    assert found("class_lines", kv__slots="class Slots:\n" + "    x = 1\n" * (lines - 1)) == breaches


@pytest.mark.parametrize(("methods", "breaches"), [(35, {}), (36, {"kv/slots:Slots": 36})])
def test_a_class_of_more_than_35_methods_is_found(methods: int, breaches: dict[str, int]) -> None:
    assert found("class_methods", kv__slots=cls(methods)) == breaches


def test_a_class_within_another_is_found_too() -> None:
    inner = cls(36).replace("\n", "\n    ").rstrip()
    assert found("class_methods", kv__slots=f"class Outer:\n    {inner}\n") == {"kv/slots:Outer.Slots": 36}


@pytest.mark.parametrize(("lines", "breaches"), [(650, {}), (651, {"kv/slots": 651})])
def test_a_module_of_more_than_650_lines_is_found(lines: int, breaches: dict[str, int]) -> None:
    assert found("module_lines", kv__slots="x = 1\n" * lines) == breaches


@pytest.mark.parametrize(("lines", "breaches"), [(60, {}), (61, {"kv/slots:work": 61})])
@pytest.mark.parametrize("kind", ["", "async "])
def test_a_function_of_more_than_60_lines_is_found(kind: str, lines: int, breaches: dict[str, int]) -> None:
    assert found("function_lines", kv__slots=kind + function(lines)) == breaches


def test_a_long_method_and_a_long_function_under_a_condition_are_found() -> None:
    method = "class Slots:\n    " + function(61, "free").replace("\n", "\n    ").rstrip()
    conditional = "if True:\n    " + function(62).replace("\n", "\n    ").rstrip()
    assert found("function_lines", kv__slots=method, kv__lease=conditional) == {"kv/slots:Slots.free": 61, "kv/lease:work": 62}


def test_of_two_functions_of_one_name_the_longer_counts() -> None:
    assert found("function_lines", kv__slots=function(70) + function(61)) == {"kv/slots:work": 70}


def test_a_kernel_may_be_long() -> None:
    assert found("function_lines", engine__machine_code__kernels=function(61)) == {}


# --- imports


def test_modules_that_import_each_other_are_found_and_a_line_of_them_is_not() -> None:
    circle = {
        "kv__a": "from mooncake_zmq.kv import b",
        "kv__b": "def late():\n    from mooncake_zmq.kv.c import C",
        "kv__c": "import mooncake_zmq.kv.a",
        "kv__d": "from mooncake_zmq.kv import a",
    }
    assert found("module_circles", **circle) == {"kv/a": 3, "kv/b": 3, "kv/c": 3}
    assert found("module_circles", **{**circle, "kv__c": "import msgspec"}) == {}


def test_two_circles_that_one_import_joins_are_two() -> None:
    two = {
        "kv__a": "from mooncake_zmq.kv import b",
        "kv__b": "from mooncake_zmq.kv import a, c",
        "kv__c": "from mooncake_zmq.kv import d",
        "kv__d": "from mooncake_zmq.kv import c",
    }
    assert found("module_circles", **two) == {"kv/a": 2, "kv/b": 2, "kv/c": 2, "kv/d": 2}


def test_rooms_that_import_each_other_are_found_even_where_no_two_modules_do() -> None:
    rooms = {"kv__a": "from mooncake_zmq.core import b", "core__b": "", "core__c": "from mooncake_zmq.kv import d", "kv__d": ""}
    assert found("module_circles", **rooms) == {}
    assert found("room_circles", **rooms) == {"kv": 2, "core": 2}
    assert found("room_circles", **{**rooms, "kv__a": ""}) == {}


@pytest.mark.parametrize(
    ("module", "text", "breaches"),
    [
        ("core__a", "from mooncake_zmq.kv.slots import Slots", {}),
        ("kv__a", "from mooncake_zmq.kv.slots import Slots", {}),
        ("kv__a", "from mooncake_zmq.config import Config", {"kv/a -> config": 1}),
        ("kv__a", "def late():\n    import mooncake_zmq.config", {"kv/a -> config": 1}),
        ("kv__a", "import importlib\nimportlib.import_module('mooncake_zmq.config')", {"kv/a -> config": 1}),
        ("prefill__a", "from mooncake_zmq.decode import decode", {"prefill/a -> decode/decode": 1}),
    ],
)
def test_an_import_of_a_room_that_is_not_on_a_lower_floor_is_found(module: str, text: str, breaches: dict[str, int]) -> None:
    others = {"kv__slots": "", "config": "", "decode__decode": ""}
    assert found("upward_imports", **{module: text}, **others) == breaches


def test_each_module_of_another_room_that_the_process_imports_counts_once_but_for_those_named() -> None:
    text = (
        "import zmq\nfrom mooncake_zmq.core.actor import Event, Effect\nfrom mooncake_zmq.core.roles import Role\n"
        "from mooncake_zmq.runtime.network import Net\ndef late():\n    from mooncake_zmq import config\n"
    )
    modules = {"core__actor": "", "core__roles": "", "config": "", "runtime__network": "from mooncake_zmq import config"}
    assert found("process_imports", runtime__process=text, **modules) == {
        "runtime/process -> core/actor": 1,
        "runtime/process -> config": 1,
    }


# --- exceptions


def handler(line: str, *body: str) -> str:
    return f"for _ in ():\n    try:\n        ...\n    {line}:\n" + "".join(f"        {each}\n" for each in body)


def two(kinds: str, body: str) -> str:
    return handler(f"except {kinds}", body) + "    except BaseException:\n        pass\n"


@pytest.mark.parametrize(
    "text",
    [
        handler("except BaseException", "pass"),
        handler("except", "pass"),
        handler("except (OSError, builtins.BaseException)", "pass"),
        handler("except BaseException as error", "log(error)"),
        handler("except BaseException as error", "if error:", "    raise"),
        handler("except BaseException as error", "raise ValueError from error"),
        handler("except BaseException", "if ready:", "    continue", "raise"),
        handler("except BaseException as error", "if wanted:", "    done.set_exception(error)"),
        handler("except BaseException as error", "done.set_exception(Lost())"),
        two("(KeyboardInterrupt, SystemExit)", "pass"),
        two("KeyboardInterrupt", "raise"),
        "with contextlib.suppress(BaseException):\n    ...\n",
    ],
)
def test_a_handler_of_everything_that_may_end_without_raising_is_found(text: str) -> None:
    assert found("swallowed_exceptions", kv__slots=text) == {"kv/slots": 1}


@pytest.mark.parametrize(
    "text",
    [
        handler("except BaseException", "close()", "raise"),
        handler("except BaseException as error", "if wrong(error):", "    raise Lost from error", "raise error"),
        handler("except OSError", "pass"),
        handler("except BaseException as error", "close()", "done.set_exception(error)"),
        two("(KeyboardInterrupt, SystemExit)", "raise"),
        "with suppress(OSError):\n    ...\n",
    ],
)
def test_a_handler_that_raises_again_or_hands_over_and_one_of_chosen_errors_pass(text: str) -> None:
    assert found("swallowed_exceptions", kv__slots=text) == {}


# --- words


@pytest.mark.parametrize(
    "text",
    [
        "def on_told(): ...",
        "class EngineTold: ...",
        "class HTTPDoor: ...",
        "MAX_WISHES = 4",
        "def work(whoever): ...",
        "def work(*, old_life: int): ...",
        "counts.add('former_life[reason=x]')",
        "class Slots:\n    def __init__(self): self._heard_at = 0",
        "class Slots:\n    resting: bool",
        "def on_rest(): ...",
        "from kv import slots as shelf",
        "for lane in (): ...",
    ],
)
def test_a_name_with_a_word_of_the_dialect_is_found_once(text: str) -> None:
    assert found("dialect_names", kv__slots=f"{text}\n{text}\n") == {"kv/slots": 1}


@pytest.mark.parametrize(
    "text",
    [
        "first, *rest = ()",  # what remains
        "restored = lifetime = half_life_s = life_cycle = restart = partial = outdoor = toldness = 1",
        "from kv.slots import told",  # given by another module
        "other.told = 1",
        "print(told)",
    ],
)
def test_a_name_without_one_or_of_another_module_passes(text: str) -> None:
    assert found("dialect_names", kv__slots=text) == {}


def test_a_modules_own_name_counts() -> None:
    assert found("dialect_names", store__shelf="") == {"store/shelf": 1}


@pytest.mark.parametrize(
    "text",
    [
        '"""Slots that nobody holds."""',
        'def free():\n    """Free it, whoever holds it."""',
        'x = 1\n"""Until its life ends."""',
        "# Nobody's.",
        "x = 1  # told by the conductor",
        '"""Of a vLLM: its blocks."""',
        '"""What it holds."""',
    ],
)
def test_a_docstring_or_comment_in_dialect_is_found(text: str) -> None:
    assert found("dialect_prose", kv__slots=text) == {"kv/slots": 1}


@pytest.mark.parametrize(
    "text",
    [
        '"""Blocks of one life cycle; the rest is free. A third-party library tolls."""',
        '"""Calls `nobody` and ``told``."""',
        "x = 'nobody'",
        "# Of both, the first.",
        "x = 1  # the half-life of a rate",
    ],
)
def test_plain_prose_passes(text: str) -> None:
    assert found("dialect_prose", kv__slots=text) == {}


def test_each_word_of_prose_is_shown_with_its_line_and_what_to_write_instead() -> None:
    breaches = gates.dialect_in_prose(sources_of({"kv/slots": '"""Slots.\n\nFreed by whoever held them, as told."""\n'}))
    assert breaches["kv/slots"].number == 2
    assert "line 3: 'whoever' (the caller, any process that: name it)" in breaches["kv/slots"].where


# --- the list of exceptions


def breaches(**numbers: int) -> Found:
    return {name: gates.Breach(number, "line 1") for name, number in numbers.items()}


@pytest.mark.parametrize(
    ("now", "listed", "says"),
    [
        ({"a": 5}, {}, "a breaks the rule"),
        ({"a": 6}, {"a": 5}, "a breaks the rule"),
        ({"a": 4}, {"a": 5}, '"a" = 4'),
        ({}, {"a": 5}, 'delete "a" = 5'),
    ],
)
def test_the_list_must_agree_with_what_is_found_and_the_line_to_change_is_shown(now: dict, listed: dict, says: str) -> None:
    (problem,) = allowed.problems(breaches(**now), listed, "it is small")
    assert says in problem


def test_nothing_is_said_of_a_list_that_agrees() -> None:
    assert not list(allowed.problems(breaches(a=5), {"a": 5}, "it is small"))


def test_shrinking_lowers_and_drops_but_raises_and_adds_nothing() -> None:
    listed = {"gate": {"lower": 9, "same": 3, "grown": 5, "gone": 7}, "unknown": {"x": 1}}
    found_now = {"gate": breaches(lower=4, same=3, grown=6, new=1), "other": breaches(y=1)}
    assert allowed.shrunk(found_now, listed) == {"gate": {"lower": 4, "same": 3, "grown": 5}, "other": {}}


def test_a_list_is_read_as_it_was_written() -> None:
    listed = {"class_lines": {"kv/slots:Slots": 500, "config -> gateway/http/tls": 1}, "module_lines": {}}
    assert allowed.read(allowed.written(listed)) == listed


def test_of_a_list_in_conflict_the_larger_numbers_are_read() -> None:
    text = '[gate]\n<<<<<<< ours\n"a" = 4\n"b" = 2\n=======\n"a" = 3\n"b" = 5\n>>>>>>> theirs\n"c" = 1\n'
    assert allowed.read(text) == {"gate": {"a": 4, "b": 5, "c": 1}}


@pytest.mark.parametrize("text", ['"a" = 1', "[gate]\na = 1", '[gate]\n"a" = -1', '[gate]\n"a" = 1 # once'])
def test_another_line_than_the_lists_own_is_refused(text: str) -> None:
    with pytest.raises(allowed.Damaged):
        allowed.read(text)


def test_what_moves_takes_its_exceptions_along_up_to_the_sum_that_there_was() -> None:
    listed = {"gate": {"kv/a": 9, "kv/b": 1, "core/a": 3}}
    split = {"gate": {name: gates.Breach(number, "") for name, number in (("kv/a", 4), ("kv/c", 5), ("core/a", 3))}}
    assert allowed.moved(split, listed, ("kv/a", "kv/c")) == {"gate": {"kv/a": 4, "kv/c": 5, "kv/b": 1, "core/a": 3}}
    grown = {"gate": {name: gates.Breach(number, "") for name, number in (("kv/a", 4), ("kv/c", 6))}}
    assert allowed.moved(grown, listed, ("kv/a", "kv/c")) == "gate: kv/a and kv/c have 10 together, and may have 9"


def test_a_folder_moves_with_all_that_it_holds_and_all_that_names_it() -> None:
    listed = {"gate": {"kv/a:Slots": 9, "config -> kv/b": 1, "kvs/a": 2}}
    renamed = {"gate": {name: gates.Breach(number, "") for name, number in (("pool/a:Slots", 9), ("config -> pool/b", 1))}}
    assert allowed.moved(renamed, listed, ("kv", "pool")) == {"gate": {"pool/a:Slots": 9, "config -> pool/b": 1, "kvs/a": 2}}


def test_a_floor_above_another_has_the_larger_number() -> None:
    assert floor_by_room((frozenset({"kv"}), frozenset({"core"}))) == {"kv": 0, "core": 1}
