"""The physical limit of a workload: the bytes it must read and the operations it must do, over what the
device was measured to reach. No engine is faster; ours is written as a fraction of it.

A decode step reads every matrix once (or, at large batches, is bound by its products) and every sequence's
keys and values once. A prefill does its products and its causal attention. Nothing overlaps with anything:
products keep the tensor cores busy, the cache keeps the memory busy, and the next token needs both.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.bench.workloads import Workload
from engine.config import DTYPE_BYTES, ModelConfig
from engine.messages import BLOCK_TOKENS
from engine.sizing import FP8, kv_bytes_per_block, parameters


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device reaches, measured."""

    bytes_per_s: float
    """Read from the device's memory."""
    products_per_s: float
    """Floating-point operations of 16-bit matrix products."""
    fp8_products_per_s: float
    attention_per_s: float


CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": Ceilings(
        bytes_per_s=4355e9, products_per_s=700e12, fp8_products_per_s=1320e12, attention_per_s=700e12
    ),
}
"""By the device's name; docs/performance.md says how they were measured."""


def ceilings(device: str) -> Ceilings | None:
    """The ceilings of a device named as in `ReplicaInfo.devices`; None where nobody measured it."""
    _rank, _, name = device.partition(" ")
    return CEILINGS.get(name)


def limit(config: ModelConfig, workload: Workload, device: Ceilings, weights: str, kv_dtype: str) -> float:
    """The best figure that a workload can have on one device, in its unit.

    weights, kv_dtype: what the layers' matrices and the cache are, of DTYPE_BYTES or "fp8". Embeddings and
    the output matrix are always of 16 bits, and so is attention's arithmetic.
    """
    fp8 = weights == FP8
    weight_bytes = 1 if fp8 else DTYPE_BYTES[weights]
    per_s = device.fp8_products_per_s if fp8 else device.products_per_s
    head = config.vocab_size * config.hidden_size
    matrices = parameters(config) - head * (1 if config.tie_word_embeddings else 2)
    at_once = 1 if workload.one_at_a_time else workload.requests
    prompt, output = workload.prompt_tokens, workload.output_tokens

    pairs = prompt * (prompt + 1) / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs
    products = 2 * matrices * prompt / per_s
    prefill_s = at_once * (products + attention / device.attention_per_s)
    # At least every matrix is read once.
    prefill_s = max(prefill_s, (matrices * weight_bytes + head * 2) / device.bytes_per_s)

    kv_per_token = kv_bytes_per_block(config, kv_dtype, 1) / BLOCK_TOKENS
    mean_context = prompt + output / 2
    step_s = max(
        (matrices * weight_bytes + head * 2) / device.bytes_per_s,
        2 * at_once * (matrices / per_s + head / device.products_per_s),
    )
    step_s += at_once * mean_context * kv_per_token / device.bytes_per_s
    seconds = prefill_s + (output - 1) * step_s

    if workload.less_is_better:
        return 1e3 * seconds
    return at_once * (output if workload.figure == "output_tok_s" else prompt) / seconds
