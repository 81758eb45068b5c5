"""The limit of a workload on one or several equal devices: the bytes that each must read and the operations
that each must do, divided by the peak rates of a device. No engine can be faster; results are printed as a
fraction of the limit. Communication between devices is not counted.

A decode step reads every matrix once, and of a mixture of experts those experts that its tokens are expected
to choose if routing is uniform (large batches are bound by GEMM operations instead), and reads the keys
and values of every sequence once. A prefill does its GEMMs and its causal attention. The model assumes no
overlap between GEMMs and cache reads, because the next token needs both.
"""

from __future__ import annotations

from engine.bench.workloads import EngineWorkload
from engine.ceilings import Ceilings, layer_parameters, read_parameters
from engine.config import DTYPE_BYTES, ModelConfig
from engine.messages import BLOCK_TOKENS
from engine.sizing import FP8, kv_bytes_per_block


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
    weight_bytes = 1 if weights == FP8 else DTYPE_BYTES[weights]
    per_s = device.gemm_rate(weights)
    # Parameters on one rank.
    head = config.vocab_size * config.hidden_size / ranks
    matrices = layer_parameters(config) / ranks
    at_once = 1 if workload.one_at_a_time else workload.requests
    prompt, output = workload.prompt_tokens, workload.output_tokens

    def read_s(tokens: int) -> float:
        """Return the time in which a pass of `tokens` tokens reads its matrices."""
        return (read_parameters(config, tokens) / ranks * weight_bytes + head * 2) / device.bytes_per_s

    pairs = prompt * (prompt + 1) / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs / ranks
    gemms = 2 * matrices * prompt / per_s
    prefill_s = at_once * (gemms + attention / device.attention_per_s)
    # Every matrix is read at least once.
    prefill_s = max(prefill_s, read_s(at_once * prompt))

    # If there are more ranks than KV heads, several ranks hold the same head.
    kv_per_token = kv_bytes_per_block(config, kv_cache_dtype, ranks) / BLOCK_TOKENS
    mean_context = prompt + output / 2
    step_s = max(
        read_s(at_once),
        2 * at_once * (matrices / per_s + head / device.gemm_per_s),
    )
    step_s += at_once * mean_context * kv_per_token / device.bytes_per_s
    seconds = prefill_s + (output - 1) * step_s

    if workload.lower_is_better:
        return 1e3 * seconds
    return at_once * (output if workload.metric == "output_tok_s" else prompt) / seconds
