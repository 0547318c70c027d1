"""A summary of a deployment for the operator."""

from collections.abc import Iterator

from mooncake_zmq.config.kv_sizes import UNKNOWN, kv_of
from mooncake_zmq.config.load import Loaded
from mooncake_zmq.config.warnings import is_tls
from mooncake_zmq.core.costs import Costs
from mooncake_zmq.core.roles import ENGINE_ROLES
from mooncake_zmq.engine.spec import ModelSpec
from mooncake_zmq.gateway.http.api_keys import api_keys_of
from mooncake_zmq.kv.codec import EXACT, bytes_in_blocks


def summary(loaded: Loaded) -> Iterator[str]:
    """Yield the lines that describe a deployment and the memory it uses. Sizes of KV are those of the model if it is on this
    machine, or its card, else of the default one."""
    config, mib = loaded.config, 1 << 20
    kv_bytes, shape = kv_of(config)
    longest = min(config.model.max_model_len, shape.max_positions) if shape else config.model.max_model_len
    totals = {"cpu": 0, "cuda": 0}
    model = f"model {config.model.path}, blocks of {config.model.block_tokens} tokens"
    if config.models:
        model = "models " + ", ".join(f"{name} ({each.path})" for name, each in config.models.items())
    yield f"cluster {config.cluster.name}: {model if config.model.engine != 'none' else 'stores alone, without a model'}"
    if config.model.engine == "own":
        yield _kv_in_blocks(config.model.kv_codec, kv_bytes, shape)
    for node in config.nodes:
        section = loaded.section(node)
        what, size = "", 0
        match node.role:
            case "cache-node":
                size = section.pool_bytes
                what = f"pool of {size / mib:,.0f} MiB, " if config.model.engine == "own" else ""
                if node.store_endpoint:
                    size += section.objects.object_bytes
                    what += f"store of {section.objects.object_bytes / mib:,.0f} MiB at {node.store_endpoint}"
                    if section.objects.tenants:
                        what += f" for {', '.join(tenant.name for tenant in section.objects.tenants)}"
                    if section.objects.ssd.directory:
                        what += f", its SSD {section.objects.ssd.bytes / mib:,.0f} MiB in {section.objects.ssd.directory}"
                what = what.removesuffix(", ")
                if section.ssd.directory:
                    what += f", SSD {section.ssd.bytes / mib:,.0f} MiB in {section.ssd.directory}"
            case "prefill":
                running = (section.max_active * longest + section.short_jobs * section.chunk_tokens) * kv_bytes
                size, what = section.slab_bytes + running, f"slab of {section.slab_bytes / mib:,.0f} MiB"
                what += f", KV of running prompts {running / mib:,.0f} MiB"
            case "decode":
                size = section.capacity_tokens * kv_bytes * (2 if section.choice else 1)  # it selects from a copy
                copied = f", half of it for selection = {section.selection!r}" if section.choice else ""
                what = f"KV of {section.capacity_tokens:,} tokens, {size / mib:,.0f} MiB{copied}"
            case "vllm":
                what = f"vLLM at {section.url}, {section.max_running} requests at a time"
                what += f", {section.part} alone" if section.part != "both" else ""
            case "conductor":
                costs = loaded.of(node).config.costs
                if costs.profile:
                    what = f"costs of {costs.profile}: " + ", ".join(_shown_costs(costs))
            case "gateway":
                what = f"{'https' if is_tls(section) else 'http'}://{section.http_host}:{section.http_port}"
                keys = api_keys_of(section.api_keys)
                what += f", API keys of {keys}" if keys else ", no API keys"
        totals[node.device] += size
        where = f"threads {node.threads}" if node.device == "cpu" else node.device
        computes = f", {where}, {node.prepared_for}" if node.computes else f", {node.backend}"
        engine = computes if node.role in ENGINE_ROLES else ""
        also = f", may become a {node.may_become}" if node.may_become else ""
        also += f"{', ' if what else ''}of model {node.model}" if node.model else ""
        yield f"  {node.name:<16} {node.role:<10} on {node.host:<12} {what}{engine}{also}"
    ram, gpu = (f"{total / mib:,.0f} MiB" for total in totals.values())
    yield f"KV and stores take at most {ram} of RAM, beside the weights (one copy for all) and the processes"
    if totals["cuda"]:
        yield f"and {gpu} of GPU memory, beside the weights (one copy for each node)"


def _kv_in_blocks(codec: str, exact: int, shape: ModelSpec | None) -> str:
    """Return how blocks hold KV, and the bytes of a token."""
    whose = "" if shape else UNKNOWN
    if codec == EXACT:
        return f"  blocks hold KV exactly: {exact:,} bytes a token{whose}"
    coded = bytes_in_blocks(codec, exact, *([shape.head_dim] if shape else []))
    return f"  blocks hold KV as {codec}: {coded:,} bytes a token{whose} ({exact:,} exactly)"


def _shown_costs(costs: Costs) -> Iterator[str]:
    yield f"prefill {1e3 * costs.prefill_token_s:.3g} ms per token"
    yield f"decode step {1e3 * costs.decode_step_s:.3g} ms + {1e3 * costs.decode_request_s:.3g} ms per request"
    yield f"{1e6 * costs.decode_context_s:.3g} us per token of KV"
