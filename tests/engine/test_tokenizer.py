"""Round trips, streams that never cut a character, and templates that cannot leave the sandbox."""

import json
import sys
import threading
import time

import pytest
import tokenizers
from model_files import small_vocabulary
from texts import TEXTS

from mooncake_zmq.engine.errors import ModelError, TemplateFailed
from mooncake_zmq.engine.gguf_vocabulary import byte_level_bpe
from mooncake_zmq.engine.tokenizer import (
    BpeVocabulary,
    ByteVocabulary,
    Conversation,
    Tokenizer,
    byte_tokenizer,
    fingerprint,
    open_tokenizer,
    read_vocabulary,
    write_byte_conversation,
    write_conversation,
)


def test_a_vocabulary_that_breaks_the_library_is_refused(tmp_path):
    """A prefix of continuing subwords that is longer than what merges make is a panic of its code."""
    whole = json.loads(tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).to_str())
    whole["model"]["continuing_subword_prefix"] = "####"
    (tmp_path / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        read_vocabulary(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_lets_other_threads_go_on():
    """With no forced switches, another thread gets its turns only where the interpreter is let go of."""
    vocabulary = BpeVocabulary(tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[])))
    turns, ended = [0], False

    def count():
        while not ended:
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        other = threading.Thread(target=count)
        other.start()
        before = turns[0]
        assert vocabulary.encode("a" * 200_000).tolist() == [0] * 200_000
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        ended = True
        other.join()
    assert after - before > 10


@pytest.mark.parametrize("text", TEXTS)
def test_no_token_stands_for_more_characters_than_the_longest(tokenizer, text):
    assert len(text) <= tokenizer.longest_token * len(tokenizer.encode(text))


def test_special_tokens_leave_no_text():
    tokenizer = open_tokenizer("toy")
    ids = tokenizer.chat([{"role": "user", "content": "hi"}])
    assert ids[0] > 255
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode([400]) == "<400>"


def test_lone_surrogates_do_not_raise(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"
    tokenizer.chat([{"role": "user", "content": "\udfff"}])


def test_many_special_tokens_in_a_text():
    assert byte_tokenizer().encode("<|end|>" * 5000).tolist() == [256] * 5000


def test_bos_is_added_when_the_model_wants_it():
    conversation = Conversation(template=None, eos_ids=(256,), bos_id=257, add_bos=True)
    tokenizer = Tokenizer(ByteVocabulary(), conversation)
    assert tokenizer.encode("a").tolist() == [257, 97]
    assert tokenizer.encode("a", special=False).tolist() == [97]
    with pytest.raises(TemplateFailed, match="no chat template"):
        tokenizer.chat([])


def with_template(template):
    return Tokenizer(ByteVocabulary(), Conversation(template=template, eos_ids=(256,), eos_token="<|end|>"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ messages[0].content.missing.attribute }}",
        "{{ messages[0]['content'] + 1 }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ 1 // (messages | length - 1) }}",
        "{{ '{} {}'.format(1) }}",
        "{{ messages[0].content * 10**15 }}",
    ],
)
def test_the_sandbox_holds(template):
    with pytest.raises(TemplateFailed):
        with_template(template).chat([{"role": "user", "content": "x"}])


def test_templates_as_hugging_face_writes_them():
    template = """{% for message in messages %}
    {% if loop.index0 == 1 %}{% continue %}{% endif %}
{{ message['role'] }}={{ message['content'] | tojson }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}go{% endif %}"""
    messages = [{"role": "a", "content": "<é>"}, {"role": "b", "content": "no"}]
    assert with_template(template).chat_text(messages) == 'a="<é>"<|end|>\ngo'


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("", '{"b": "é", "a": 1}'),
        ("ensure_ascii=True", r'{"b": "\u00e9", "a": 1}'),
        ("separators=(',', ':')", '{"b":"é","a":1}'),
        ("indent=1, sort_keys=True", '{\n "a": 1,\n "b": "é"\n}'),
    ],
)
def test_templates_write_json_with_the_options_of_hugging_face(options, text):
    template = with_template(f"{{{{ messages[0] | tojson({options}) }}}}")
    assert template.chat_text([{"b": "é", "a": 1}]) == text


def test_tools_and_documents_that_are_not_given_are_none():
    template = with_template("{% if tools is not none %}{{ tools | length }}{% endif %}{{ documents is none }}")
    assert template.chat_text([]) == template.chat_text([], tools=[]) == "True"
    assert template.chat_text([], tools=[{}]) == "1True"


def test_templates_that_mark_what_the_assistant_says():
    template = "{% for message in messages %}{% generation %}{{ message.content }}{% endgeneration %};{% endfor %}"
    assert with_template(template).chat_text([{"content": "a"}, {"content": "b"}]) == "a;b;"


@pytest.mark.parametrize("template", ["{% if %}", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{{ " + "-" * 500 + "1 }}"])
def test_a_template_that_does_not_parse(template):
    with pytest.raises(ModelError, match="does not parse"):
        with_template(template)


def test_fingerprint_covers_vocabulary_and_template(tmp_path):
    prints = [fingerprint("toy")]
    for size in (512, 1024):
        write_byte_conversation(tmp_path, size)
        prints.append(fingerprint(tmp_path))
    for template, vocabulary in (("a", "{}"), ("b", "{}"), ("b", "{ }")):
        write_conversation(tmp_path, Conversation(template=template, eos_ids=(1,)))
        (tmp_path / "tokenizer.json").write_text(vocabulary)
        prints.append(fingerprint(tmp_path))
    assert len(set(prints)) == 6
    (tmp_path / "header.json").write_text("{}")
    assert fingerprint(tmp_path) == prints[-1], "the model's fingerprint covers its header"


def test_an_unknown_pre_tokenizer_is_named():
    with pytest.raises(ModelError, match="viking"):
        byte_level_bpe(tokens=["a"], merges=[], kinds=[1], pre="viking")


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_what_a_file_cuts_and_fills_for_training_changes_no_prompt(tmp_path, salt):
    vocabulary = small_vocabulary()
    vocabulary.enable_truncation(4)
    vocabulary.enable_padding(direction="left", pad_id=96, pad_token="<s>", pad_to_multiple_of=8)
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    write_conversation(tmp_path, Conversation(template=None, eos_ids=(97,)))
    text = "<s>" + "the last word counts" * 10
    assert open_tokenizer(tmp_path).encode(text, salt=salt).tolist() == small_vocabulary().encode(text).ids
