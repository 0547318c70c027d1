"""The model: weights, tokenizer, KV of running sequences, prefill, decode. Knows no roles, messages or sockets."""
