"""The same mathematics in float64, written for the eye: whole prompt, no cache, no tiles. Takes canonical tensors."""

import numpy as np

from mooncake_zmq.engine.spec import FAMILIES


def logits(source, tokens):
    spec, position = source.spec, np.arange(len(tokens))

    def matrix(name):
        return source.tensor(name).astype(np.float64)

    def normalize(x, name):
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + spec.norm_eps) * matrix(name)

    def rotate(x):  # [token, head, dim], Hugging Face's halves
        angle = position[:, None, None] * matrix("inv_freq")
        first, second = np.split(x, 2, axis=2)
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

    def projected(normed, layer, part):  # [token, head, dim]
        heads = normed @ matrix(f"{layer}.{part}").T
        if FAMILIES[spec.family].qkv_bias:
            heads = heads + matrix(f"{layer}.{part}_bias")
        heads = heads.reshape(len(tokens), -1, spec.head_dim)
        if FAMILIES[spec.family].qk_norm and part != "v":
            heads = np.stack([normalize(head, f"{layer}.{part}_norm") for head in heads.swapaxes(0, 1)], axis=1)
        return heads

    x = matrix("embed")[tokens]
    future = np.triu(np.ones((len(tokens), len(tokens)), dtype=bool), k=1)
    for layer in range(spec.layers):
        normed = normalize(x, f"{layer}.attn_norm")
        queries, keys = (rotate(projected(normed, layer, part)) for part in "qk")
        values = projected(normed, layer, "v")
        mixed = np.empty_like(queries)
        for head in range(spec.heads):
            shared = head * spec.kv_heads // spec.heads
            scores = queries[:, head] @ keys[:, shared].T / np.sqrt(spec.head_dim)
            scores[future] = -np.inf
            share = np.exp(scores - scores.max(axis=1, keepdims=True))
            mixed[:, head] = share @ values[:, shared] / share.sum(axis=1, keepdims=True)
        x = x + mixed.reshape(len(tokens), -1) @ matrix(f"{layer}.out").T
        normed = normalize(x, f"{layer}.ffn_norm")
        gate, up = normed @ matrix(f"{layer}.gate").T, normed @ matrix(f"{layer}.up").T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ matrix(f"{layer}.down").T
    return normalize(x, "final_norm") @ matrix("embed" if spec.tied else "head").T
