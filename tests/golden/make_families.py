"""Writes families.npz: what Hugging Face transformers (CPU torch, float32) computes for the tiny models of families.py.

An independent reference: it shares no code with mooncake_zmq. Run it in an environment of its own:

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers numpy
    /tmp/golden/bin/python tests/golden/make_families.py

Read the file with `np.load(..., allow_pickle=False)`. For each model NAME:

    NAME/digest (text)         of the weights                    NAME/config (text)  config.json as transformers writes it
    NAME/positions [P]         of the prompt                     NAME/logits [P, vocabulary]  there
    NAME/greedy [16]           greedy continuation               NAME/greedy_logits [16, vocabulary]  that chose each
"""

from pathlib import Path

import families
import numpy as np
import torch
import transformers

POSITIONS = (0, 1, 17, 63, 64, 65, 127, 158)  # and the last, which chose the first greedy token


@torch.no_grad()
def reference(name: str) -> dict[str, np.ndarray]:
    fields = families.config(name)
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    state = {tensor: torch.from_numpy(values.copy()) for tensor, values in families.weights(name).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= ({"lm_head.weight"} if fields["tie_word_embeddings"] else set()), missing
    model.tie_weights()
    prompt = families.tokens(name)
    output = model(torch.from_numpy(prompt[None]).long(), use_cache=True)
    logits = output.logits[0].numpy()
    chosen, chosen_logits = [], []
    for _ in range(families.GREEDY_TOKENS):
        chosen_logits.append(output.logits[0, -1].numpy())
        chosen.append(int(chosen_logits[-1].argmax()))
        output = model(torch.tensor([chosen[-1:]]), past_key_values=output.past_key_values, use_cache=True)
    config.architectures = [type(model).__name__]
    return {
        "digest": np.array(families.digest(name)),
        "config": np.array(config.to_json_string(use_diff=True)),
        "positions": np.array(POSITIONS, dtype=np.int32),
        "logits": logits[list(POSITIONS)],
        "greedy": np.array(chosen, dtype=np.int32),
        "greedy_logits": np.array(chosen_logits),
    }


def main() -> None:
    path = Path(__file__).with_name("families.npz")
    record = {f"{name}/{key}": value for name in families.MODELS for key, value in reference(name).items()}
    np.savez_compressed(path, **record)
    print(f"{path}: {path.stat().st_size} bytes, {len(families.MODELS)} models")


if __name__ == "__main__":
    main()
