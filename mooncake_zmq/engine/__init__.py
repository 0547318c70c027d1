"""The model: weights, tokenizer, KV of running sequences, prefill, decode. It knows no roles, messages or sockets."""
