"""Computes a workload's limit: the best result that the hardware allows, on one or more identical devices.

The limit follows from the bytes that each device must read, the operations it must perform, and its peak
rates. No engine can be faster, so results are printed as fractions of the limit. Communication between
devices is ignored.

A decode step reads every matrix once, and the keys and values of every sequence once. In an MoE layer, a step
is assumed to read as many distinct experts as are expected if every token is equally likely to choose each
expert. With large batches, a decode step's GEMMs are compute-bound instead of memory-bound. A prefill's limit
covers its GEMMs and its causal attention. GEMMs and cache reads are assumed not to overlap, because each
layer needs the result of the previous one.
"""

from __future__ import annotations

from engine.bench.workloads import EngineWorkload
from engine.ceilings import Ceilings, layer_parameters, read_parameters
from engine.config import ModelConfig
from engine.messages import BLOCK_TOKENS, KvDType, WeightsDType
from engine.sizing import element_bytes, kv_bytes_per_block


def limit(
    config: ModelConfig,
    workload: EngineWorkload,
    device: Ceilings,
    weights: WeightsDType,
    kv_cache_dtype: KvDType,
    ranks: int = 1,
) -> float:
    """Return the best possible result of a workload on `ranks` devices, in the workload's unit.

    `weights` and `kv_cache_dtype` are the dtypes of the layers' matrices and of the KV cache. The embeddings,
    the output matrix and attention arithmetic always use 16 bits.
    """
    weight_bytes = element_bytes(weights)
    per_s = device.gemm_rate(weights)
    # The following variables count parameters per rank.
    head = config.vocab_size * config.hidden_size / ranks
    matrices = layer_parameters(config) / ranks
    at_once = 1 if workload.one_at_a_time else workload.requests
    prompt, output = workload.prompt_tokens, workload.output_tokens

    def read_s(tokens: int) -> float:
        """Return the time that a pass of `tokens` tokens spends reading matrices."""
        return (read_parameters(config, tokens) / ranks * weight_bytes + head * 2) / device.bytes_per_s

    pairs = prompt * (prompt + 1) / 2
    attention = 4 * config.layers * config.heads * config.head_dim * pairs / ranks
    gemms = 2 * matrices * prompt / per_s
    prefill_s = at_once * (gemms + attention / device.attention_per_s)
    # A prefill reads every matrix at least once.
    prefill_s = max(prefill_s, read_s(at_once * prompt))

    # If there are more ranks than KV heads, several ranks store the same head.
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
