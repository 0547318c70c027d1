"""`load_blocks` and `store_parts` of one."""

from mooncake_zmq.transfer.block_copy import load_blocks, store_parts


def load_layers(segment, load, layers, sequence, **options):
    return load_blocks([(segment, load, layers)], sequence, **options)[0]


def store_part(sequence, layer, start, stop, segment, slot):
    return store_parts(sequence, segment, [(slot, layer, start, stop - start)])[0]
