"""Keys of prompts with images: by content, place and all before them, and those of plain text where no image has begun."""

import random

from mooncake_zmq.kv.block_hash import extend_keys, namespace, pack_tokens
from mooncake_zmq.kv.image_keys import digest_of, keys_with_images, shifted

ROOT = namespace(model="m", layout="l")
CAT, DOG = digest_of("cat"), digest_of("dog")
TOKENS = pack_tokens([1, 9, 9, 9, 9, 9, 2, 3, 4, 5, 9, 9, 9])


def keys(*begins):
    return keys_with_images(ROOT, TOKENS, 4, begins)


def test_without_images_the_keys_are_those_of_text():
    assert keys() == extend_keys(ROOT, TOKENS, 4)


def test_equal_images_in_equal_places_share_all_keys_and_others_none_from_there_on():
    assert keys((1, CAT)) == keys((1, CAT))
    assert not set(keys((1, CAT))) & set(keys((1, DOG)))
    assert not set(keys((1, CAT))) & set(keys((2, CAT)))
    assert not set(keys((1, CAT))) & set(keys((1, CAT), (2, DOG)))


def test_blocks_before_an_image_are_those_of_text():
    text, image = keys(), keys((6, CAT))
    assert image[0] == text[0]
    assert not set(image[1:]) & set(text)


def test_an_image_in_the_block_that_is_not_complete_changes_no_key_yet():
    assert keys((12, CAT)) == keys()


def test_keys_made_in_pieces_are_those_made_at_once():
    chance = random.Random(7)
    for _ in range(200):
        tokens = pack_tokens([chance.randrange(3) for _ in range(chance.randrange(40))])
        places = sorted(chance.sample(range(len(tokens) // 4), min(len(tokens) // 4, chance.randrange(4))))
        begins = [(at, chance.choice((CAT, DOG))) for at in places]
        whole = keys_with_images(ROOT, tokens, 4, begins)
        done = chance.randrange(len(whole) + 1)
        first = keys_with_images(ROOT, tokens[: done * 16], 4, [each for each in begins if each[0] < done * 4])
        rest = keys_with_images(first[-1] if first else ROOT, tokens[done * 16 :], 4, shifted(begins, done * 4))
        assert first + rest == whole
