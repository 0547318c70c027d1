"""Answers follow their grammar from wherever they go on, and end exactly where it lets them."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from near_tie import near_tie

from mooncake_zmq.core.messages import Sampling
from mooncake_zmq.engine.constraint import MAX_COMPILED, Compiler, ConstraintError, NamedWords
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.engine.sampling import Past, choose, scores
from mooncake_zmq.engine.tokenizer import ByteVocabulary, byte_tokenizer, open_tokenizer
from mooncake_zmq.gateway.openai.constraints import of_lark, of_schema
from mooncake_zmq.kv.block_hash import pack_tokens

END = ByteVocabulary.END_ID
PERSON = of_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)
YES_NO = of_lark('start: "yes" | "no"')


@pytest.fixture(scope="module", params=["bytes", "smollm2"])
def path(request):
    return "toy" if request.param == "bytes" else str(request.getfixturevalue("default_path"))


@pytest.fixture(scope="module")
def tokenizer(path):
    return open_tokenizer(path)


@pytest.fixture(scope="module")
def grammars(path, tokenizer):
    made = Grammars(path, tokenizer.vocab_size + 3)
    yield made
    made.close()


@pytest.fixture
def toy():
    made = Grammars("toy", 512)
    yield made
    made.close()


def matched(grammars, constraint, answer=()):
    """Which ids may come next."""
    return grammars.begin(constraint, answer).allowed()


def draw(grammars, sampling, tokenizer, tokens=(), most=400):
    """An answer of noise, from these tokens on."""
    tokens = list(tokens)
    past = Past(sampling, pack_tokens(tokens), grammars)
    while not (tokens and tokens[-1] in tokenizer.eos_ids) and len(tokens) < most:
        noise = np.random.default_rng([sampling.seed, len(tokens)]).normal(size=tokenizer.vocab_size + 3)
        token, _ = choose(noise.astype(np.float32), sampling, len(tokens), past)
        past.feed(token, len(tokens))
        tokens.append(token)
    return tokens


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("seed", range(2))
def test_noise_becomes_json_of_the_schema_and_a_resumed_answer_goes_on_alike(grammars, tokenizer, seed, temperature):
    sampling = Sampling(temperature=temperature, seed=seed, top_k=50, presence_penalty=0.5, constraint=PERSON)
    whole = draw(grammars, sampling, tokenizer)
    assert whole[-1] in tokenizer.eos_ids
    person = json.loads(tokenizer.decode(whole))
    assert len(person["name"]) <= 6
    assert 0 <= person["age"] <= 150
    assert set(person.get("tags", [])) <= {"a", "bc"}
    for cut in range(0, len(whole), 1 + len(whole) // 6):
        assert draw(grammars, sampling, tokenizer, whole[:cut]) == whole


def test_the_end_is_allowed_exactly_where_the_grammar_accepts(grammars, tokenizer):
    following = grammars.begin(YES_NO)
    assert not following.allowed()[list(tokenizer.eos_ids)].any()
    following.feed(tokenizer.eos_ids[0])
    with pytest.raises(ConstraintError, match="ended where its grammar does not"):
        following.allowed()
    following = grammars.begin(YES_NO, tokenizer.encode("no", special=False))
    for _ in range(3):  # whoever wants to hear nothing of ends hears them to his last token
        assert np.flatnonzero(following.allowed()).tolist() == list(tokenizer.eos_ids)
        following.feed(tokenizer.eos_ids[0])
    following.feed(tokenizer.encode("y", special=False)[0])
    for _ in range(2):
        with pytest.raises(ConstraintError):
            following.allowed()
        following.feed(tokenizer.eos_ids[0])


def test_ids_that_stand_for_no_text_are_never_allowed(grammars, tokenizer):
    allowed = matched(grammars, of_lark("start: /(.|\\n)*/"))
    assert not allowed[tokenizer.vocab_size :].any()
    assert not allowed[sorted(tokenizer.special_ids - set(tokenizer.eos_ids))].any()
    assert allowed[tokenizer.encode("a", special=False)].all()


def test_an_answer_that_is_none_of_the_grammar_is_an_error(grammars, tokenizer):
    with pytest.raises(ConstraintError):
        matched(grammars, YES_NO, tokenizer.encode("maybe", special=False))
    past = Past(Sampling(constraint=YES_NO), pack_tokens(tokenizer.encode("maybe", special=False)), grammars)
    with pytest.raises(ConstraintError):
        past.forbid(np.zeros(tokenizer.vocab_size + 3, np.float32))


@pytest.mark.parametrize("nonsense", [b"{", b"\xff", b"", of_lark("start: a"), of_lark("start: /(?=a)/")])
def test_nonsense_is_refused_each_time_it_is_asked(toy, nonsense):
    for _ in range(2):
        with pytest.raises(ConstraintError):
            toy.check(nonsense)


def test_what_has_no_answer_is_refused(toy):
    with pytest.raises(ConstraintError):
        toy.check(of_lark("start: start"))


def test_the_vocabulary_is_read_once_and_not_before_it_is_asked_for():
    opened = []

    def words():
        opened.append(1)
        return byte_tokenizer()

    compiler = Compiler(words, 512)
    assert not opened
    for _ in range(3):
        compiler.matcher(YES_NO).allowed()
    assert len(opened) == 1


def test_what_has_answers_byte_by_byte_has_them_in_the_models_own_tokens(tokenizer):
    by_bytes = Grammars(NamedWords.of(tokenizer, tokenizer.vocab_size), tokenizer.vocab_size)
    end = tokenizer.eos_ids[0]
    for constraint in (PERSON, YES_NO, of_lark(f"start: <[{min(tokenizer.special_ids - {end})}]> /[a-z]+/")):
        by_bytes.check(constraint)
        allowed = matched(by_bytes, constraint)
        assert allowed.sum() in (1, 2)
        assert not allowed[end]
    with pytest.raises(ConstraintError):
        by_bytes.check(of_lark("start: start"))
    by_bytes.close()
    by_bytes.close()


def test_a_vocabulary_that_lacks_bytes_is_checked_as_if_it_had_them():
    few = SimpleNamespace(eos_ids=(98,), special_ids=frozenset((97, 98)), piece={97: b"<s>", 98: b"</s>"}.get)
    words = NamedWords.of(few, 99)
    grammars = Grammars(words, words.vocab_size)
    grammars.check(YES_NO)
    grammars.close()


def test_compiled_grammars_are_kept_up_to_a_bound():
    compiler = Compiler(byte_tokenizer, 512)
    for number in range(MAX_COMPILED + 5):
        compiler.matcher(of_lark(f'start: "{number}"'))
    assert len(compiler._compiled) == MAX_COMPILED


def test_a_model_without_an_end_has_no_constraints():
    tokenizer = byte_tokenizer()
    tokenizer.eos_ids = ()
    grammars = Grammars(NamedWords.of(tokenizer, 512), 512)
    for _ in range(2):
        with pytest.raises(ConstraintError, match="no token that ends"):
            grammars.check(YES_NO)
    grammars.close()


def feed_until_it_ends(following, token):
    while following.allowed()[token]:
        following.feed(token)


def test_a_grammar_that_grows_beyond_its_limits_fails_and_no_other_does(toy):
    growing = of_lark('start: ("a"{1,1000}){1,1000}')
    one, other = toy.begin(growing), toy.begin(growing)
    with pytest.raises(ConstraintError):
        feed_until_it_ends(one, ord("a"))
    assert other.allowed()[ord("a")]
    assert toy.counts == {"begun": 1}


def test_what_is_forbidden_stays_so_whatever_the_bias(toy):
    logits = np.zeros(512, np.float32)
    sampling = Sampling(logit_bias=((ord("x"), 100.0),), constraint=YES_NO, temperature=1.0, top_p=0.1, seed=3)
    past = Past(sampling, b"", toy)
    assert set(np.flatnonzero(np.isfinite(scores(logits, sampling, 0, past)))) == {ord("y"), ord("n")}
    assert near_tie(logits, Sampling(constraint=YES_NO), 0, past)


CHAINS = """
import json
from mooncake_zmq.engine.constraint import ConstraintError
from mooncake_zmq.engine.grammars import Grammars
from mooncake_zmq.gateway.openai.constraints import of_lark

def rules(count, of="r"):
    return f"start: {of}0\\n" + "".join(f"{of}{i}: {of}{i + 1}\\n" for i in range(count)) + f'{of}{count}: "a"'

def schema(count):
    chain = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": chain | {f"d{count}": {"type": "null"}}}

grammars = Grammars("toy", 512)
for much in (1000, 3500, 20000):
    whole = json.dumps({"grammars": [{"json_schema": schema(much)}]})
    hidden = json.dumps({"grammars": [{"lark_grammar": rules(much)}]}).replace("r", "\\\\u0072")
    inline = f"start: %json {json.dumps(schema(much))}"
    escaped = whole.replace("$ref", "\\\\u0024ref")
    for grammar in (rules(much), rules(much, "R"), whole, escaped, hidden, inline):
        try:
            grammars.check(grammar.encode())
            print("followed", end=" ")
        except ConstraintError as error:
            print("refused" if "rules and references" in str(error) else error, end=" ")
assert grammars.counts == {"begun": 1}
"""


def test_a_chain_of_rules_or_references_ends_no_process():
    ran = subprocess.run([sys.executable, "-c", CHAINS], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["followed"] * 12 + ["refused"] * 6


def test_choices_that_overlap_are_refused_in_the_clients_words():
    with pytest.raises(ConstraintError, match="oneOf whose choices may both hold is not supported: use anyOf"):
        Compiler(byte_tokenizer, 512).matcher(of_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}))
