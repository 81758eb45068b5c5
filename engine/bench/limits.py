"""The limit of a workload on one or several equal devices: the bytes that each must read and the operations
that each must do, divided by the peak rates of a device. No engine can be faster; results are printed as a
fraction of the limit. Communication between devices is not counted.

A decode step reads every matrix once (large batches are bound by GEMM operations instead), and reads the keys
and values of every sequence once. A prefill does its GEMMs and its causal attention. The model assumes no
overlap between GEMMs and cache reads, because the next token needs both.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.bench.workloads import EngineWorkload
from engine.config import DTYPE_BYTES, ModelConfig
from engine.messages import BLOCK_TOKENS
from engine.sizing import FP8, kv_bytes_per_block, parameters


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Peak rates of one device."""

    bytes_per_s: float
    """Read bandwidth of the device's memory."""
    gemm_per_s: float
    """Floating-point operations of 16-bit GEMMs."""
    fp8_gemm_per_s: float
    attention_per_s: float


_H200 = Ceilings(bytes_per_s=4355e9, gemm_per_s=700e12, fp8_gemm_per_s=1320e12, attention_per_s=700e12)

CEILINGS: dict[str, Ceilings] = {
    "NVIDIA H200": _H200,
    # Not measured. Memory: the data sheet's 3.35 TB/s times the fraction that an H200 reaches of its data
    # sheet's 4.8 TB/s. Operations: as an H200, which has the same multiprocessors and data-sheet rates.
    "NVIDIA H100 80GB HBM3": replace(_H200, bytes_per_s=3.35e12 * _H200.bytes_per_s / 4.8e12),
}
"""Peak rates by device name. docs/performance.md describes the measurements."""


def device_model(device: str) -> str:
    """Return the model of a device named as in `ReplicaInfo.devices`: the name without its number."""
    return device.partition(" ")[2] or device


def ceilings(device: str) -> Ceilings | None:
    """Return the peak rates of a device named as in `ReplicaInfo.devices`; None if they are not known."""
    return CEILINGS.get(device_model(device))


def limit(
    config: ModelConfig,
    workload: EngineWorkload,
    device: Ceilings,
    weights: str,
    kv_cache_dtype: str,
    ranks: int = 1,
) -> float:
    """Return the best possible result of a workload on `ranks` devices, in the workload's unit.

    weights, kv_cache_dtype: dtypes of the layers' matrices and of the cache, from DTYPE_BYTES or "fp8".
    Embeddings, the output matrix and the arithmetic of attention always have 16 bits.
    """
    fp8 = weights == FP8
    weight_bytes = 1 if fp8 else DTYPE_BYTES[weights]
    per_s = device.fp8_gemm_per_s if fp8 else device.gemm_per_s
    # The parts of one rank.
    head = config.vocab_size * config.hidden_size / ranks
    matrices = parameters(config) / ranks - head * (1 if config.tie_word_embeddings else 2)
    at_once = 1 if workload.one_at_a_time else workload.requests
    prompt, output = workload.prompt_tokens, workload.output_tokens

    pairs = prompt * (prompt + 1) / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs / ranks
    gemms = 2 * matrices * prompt / per_s
    prefill_s = at_once * (gemms + attention / device.attention_per_s)
    # Every matrix is read at least once.
    prefill_s = max(prefill_s, (matrices * weight_bytes + head * 2) / device.bytes_per_s)

    # Ranks that outnumber the KV heads hold copies of them.
    kv_per_token = kv_bytes_per_block(config, kv_cache_dtype, ranks) / BLOCK_TOKENS
    mean_context = prompt + output / 2
    step_s = max(
        (matrices * weight_bytes + head * 2) / device.bytes_per_s,
        2 * at_once * (matrices / per_s + head / device.gemm_per_s),
    )
    step_s += at_once * mean_context * kv_per_token / device.bytes_per_s
    seconds = prefill_s + (output - 1) * step_s

    if workload.lower_is_better:
        return 1e3 * seconds
    return at_once * (output if workload.metric == "output_tok_s" else prompt) / seconds
