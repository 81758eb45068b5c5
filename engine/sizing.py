"""Predicts a model's memory use per rank before the model is loaded. This module does not load torch.

The sizes of the weights and the KV cache are exact. The activation size is an estimate, based on the largest
set of tensors alive at the same time in the largest step. A replica reports both the predicted and the
measured memory use.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import gcd
from typing import Final

from engine.config import (
    DTYPE_BYTES,
    EXPERTS,
    FP8_BLOCK_INPUTS,
    CheckpointError,
    ModelConfig,
    ModelError,
    Shard,
    fp8_block,
)
from engine.families import read_config
from engine.memory import CPU_MAX_KV_BYTES, available_host_bytes
from engine.messages import BLOCK_TOKENS, KvDType, ModelDType, Quantization, WeightsDType
from engine.model.checkpoint import INDEX, SINGLE, read_entries

__all__ = [
    "CPU_MAX_KV_BYTES",
    "INDEX",
    "SINGLE",
    "CheckpointError",
    "ModelError",
    "Sizing",
    "available_host_bytes",
    "decode_capture_sizes",
    "kv_bytes_per_block",
    "parameters",
    "predict",
    "read_config",
    "read_entries",
    "weights_dtype",
]

FP8: Final = "fp8"
"""Dtype name for e4m3 weights or KV caches with float32 scales. Weights have one scale per output."""
FP8_BLOCKS: Final = "fp8-block"
"""Dtype name for e4m3 weights with one float32 scale per block of rows and columns."""

EXPANSION_BLOCKS = 1024
"""Maximum number of FP8 cache blocks that a pass with prompts expands to the model's dtype on a GPU."""

_GATHERED_BYTES = 4 << 20
"""Maximum size, in bytes, of the keys that the CPU backend (`kernels.reference`) copies at once. A single
sequence's keys are always copied together, even if they are larger."""

_SAMPLED_COPIES = 4
"""Number of logits-sized float32 arrays needed to sample on a CPU: logits, noise, sorted values and
cumulative values."""

_GRAPH_LAYER_BYTES = 300 << 10
"""Memory, in bytes, that the CUDA graphs of one batch size use per layer (see `graph_bytes`)."""
_CUDA_BYTES = 700 << 20
"""Memory, in bytes, used by CUDA itself for its context, modules and library workspaces."""
PEER_ARENA_BYTES = 34_603_008
"""Size, in bytes, of the memory through which a GPU exchanges messages with one other rank
(`engine.peer_memory`)."""
OVERLAP_FROM_TOKENS = 4096
"""With several GPUs, passes of at least this many tokens overlap their all-reduces with computation
(docs/parallel.md)."""
_SPLIT_TOKENS = 256
"""If all-reduces overlap with computation, the number of tokens in the first half of a pass is a multiple of
this value, so that GEMM tiles are full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One rank's predicted memory use, in bytes."""

    weight_bytes: int
    kv_bytes_per_block: int
    kv_blocks: int
    """The number of blocks passed to `predict`, or 0 if it was None."""
    activation_bytes: int
    """Memory for hidden states, projections, logits and the attention workspace in a step that uses the full
    token budget."""
    table_bytes: int
    """Memory for all slots' device tables and the rotary table."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_blocks * self.kv_bytes_per_block

    @property
    def fixed_bytes(self) -> int:
        """All memory except the KV cache."""
        return self.weight_bytes + self.activation_bytes + self.table_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


def parameters(config: ModelConfig) -> int:
    """Return the model's number of parameters. Tied embeddings are counted once."""
    return _parameters(config, config.shard(1, 0))


def kv_bytes_per_block(config: ModelConfig, kv_cache_dtype: KvDType, tensor_parallel_size: int) -> int:
    """Return a KV block's size in bytes on one rank. A block contains the keys and values of BLOCK_TOKENS
    tokens in all layers: `2 × layers × KV heads per rank × 64 × head_dim` elements and, with "fp8", a float32
    scale for each key and value.
    """
    shard = config.shard(tensor_parallel_size, 0)
    head = config.head_dim + 4 if kv_cache_dtype == FP8 else config.head_dim * DTYPE_BYTES[kv_cache_dtype]
    return 2 * config.layers * shard.kv_heads * BLOCK_TOKENS * head


def predict(
    config: ModelConfig,
    *,
    dtype: ModelDType,
    weights: WeightsDType,
    kv_cache_dtype: KvDType,
    tensor_parallel_size: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    blocks: int | None,
    on_gpu: bool,
) -> Sizing:
    """Predict rank 0's memory use, which is the highest, because only rank 0 has the biases of all-reduced
    linears.

    `dtype` is the model's dtype, a key of `engine.config.DTYPE_BYTES`. `weights` (see `weights_dtype`) and
    `kv_cache_dtype` are keys of the same mapping, or "fp8"; `weights` may also be "fp8-block". `max_num_seqs`
    is the maximum number of running sequences. `max_num_batched_tokens` is the token budget of a step.
    `blocks` is the size of the KV pool, or None if it is not yet known. Raises UnsupportedError if the model
    cannot be split across the ranks.
    """
    shard = config.shard(tensor_parallel_size, 0)
    return Sizing(
        weight_bytes=weight_bytes(config, shard, dtype, weights),
        kv_bytes_per_block=kv_bytes_per_block(config, kv_cache_dtype, tensor_parallel_size),
        kv_blocks=blocks or 0,
        activation_bytes=_activations(config, shard, dtype, max(max_num_batched_tokens, max_num_seqs))
        + (
            _workspace_on_gpu(config, shard, dtype, kv_cache_dtype, max_num_seqs, max_num_batched_tokens)
            + peer_bytes(tensor_parallel_size)
            + overlap_bytes(config, dtype, tensor_parallel_size, max_num_batched_tokens)
            + captured_bytes(config, dtype, tensor_parallel_size, max_num_batched_tokens)
            if on_gpu
            else _workspace_on_cpu(config, shard, dtype, weights, max_num_seqs, max_model_len)
        ),
        table_bytes=_tables(config, max_num_seqs, max_model_len),
    )


def weight_bytes(config: ModelConfig, shard: Shard, dtype: ModelDType, weights: WeightsDType) -> int:
    """Return the total size of a rank's weights in bytes. `dtype` is the dtype of the embeddings, the norms
    and the output matrix. `weights` is the dtype of the layers' matrices: `dtype`, "fp8" or "fp8-block".
    """
    width = DTYPE_BYTES[dtype]
    if weights not in (FP8, FP8_BLOCKS):
        return _parameters(config, shard) * width
    quantised = _matrices(config, shard)
    matrices = sum(each.elements for each in quantised)
    scales = sum(each.blocks if weights == FP8_BLOCKS else each.count * each.outputs for each in quantised)
    return matrices + 4 * scales + (_parameters(config, shard) - matrices) * width


def element_bytes(weights: WeightsDType) -> int:
    """Return the element size of the layers' matrices in bytes, excluding scales."""
    if weights == FP8:
        return 1
    return 1 if weights == FP8_BLOCKS else DTYPE_BYTES[weights]


def weights_dtype(
    config: ModelConfig,
    quantization: Quantization,
    dtype: ModelDType,
    *,
    on_gpu: bool,
    tensor_parallel_size: int,
) -> WeightsDType:
    """Return the dtype of a replica's layer matrices: `dtype`, "fp8" or "fp8-block". If the GPU kernels do
    not support the blocks of a rank's matrices, all matrices are converted on loading to one scale per output
    ("fp8"). Raises UnsupportedError if the model cannot be split across the ranks.
    """
    if quantization == FP8 or (config.fp8 and not config.fp8_blocks):
        return FP8
    if not config.fp8:
        return dtype
    if not on_gpu or dtype == "float32":  # the reference implementation supports all blocks
        return FP8_BLOCKS
    matrices = _matrices(config, config.shard(tensor_parallel_size, 0))
    supported = all(each.inputs % FP8_BLOCK_INPUTS == 0 for each in matrices)
    return FP8_BLOCKS if supported else FP8


@dataclass(frozen=True, slots=True)
class _Matrices:
    """Matrices of the same shape that can be quantised."""

    count: int
    outputs: int
    inputs: int
    row_part: int
    """The `row_part` parameter of `engine.model.layers.ParameterFactory.matrix`."""
    column_part: int

    @property
    def elements(self) -> int:
        return self.count * self.outputs * self.inputs

    @property
    def blocks(self) -> int:
        """Number of FP8 blocks."""
        rows = -(-self.outputs // fp8_block(self.row_part))
        return self.count * rows * -(-self.inputs // fp8_block(self.column_part))


def _matrices(config: ModelConfig, shard: Shard) -> list[_Matrices]:
    """Return all matrices that can be quantised: qkv, o, and the gate_up and down matrices of every MLP and
    expert."""
    hidden, q, kv = config.hidden_size, shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    qkv = _Matrices(1, q + 2 * kv, hidden, gcd(q, kv), 0)
    found = [qkv, _Matrices(1, hidden, q, 0, shard.cut(q))] * config.layers
    for kind in config.layer_kinds:
        for count, width, whole in _mlps(config, shard, kind):
            found.append(_Matrices(count, 2 * width, hidden, width, 0))
            found.append(_Matrices(count, hidden, width, 0, 0 if whole else shard.cut(width)))
    return found


def _mlps(config: ModelConfig, shard: Shard, kind: str) -> list[tuple[int, int, bool]]:
    """Return a (count, width, whole) tuple for each kind of MLP or expert that a layer has on this rank.
    `whole` says whether they are kept whole rather than split across the ranks."""
    if kind != EXPERTS or config.experts is None:
        return [(1, shard.intermediate, False)]
    shared, here = config.experts.shared_intermediate_size, shard.experts(config.experts)
    routed = (here.count, here.width, config.experts.whole)
    return [routed] if shared is None else [routed, (1, shard.part(shared), False)]


def _parameters(config: ModelConfig, shard: Shard) -> int:
    """Return the number of elements in all of this rank's weights, including vocabulary padding. A layer
    contains its matrices, two norms and, depending on the model family, biases, QK norms, a router and a
    shared expert's gate.
    """
    hidden, q, kv = config.hidden_size, shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    matrices = sum(each.elements for each in _matrices(config, shard))
    layer = 2 * hidden
    first = shard.rank == 0
    if config.qkv_bias:
        layer += q + 2 * kv
    if config.o_bias and first:
        layer += hidden
    if config.mlp_bias:
        layer += 2 * shard.intermediate + (hidden if first else 0)
    if config.qk_norm:
        layer += 2 * config.head_dim
    if config.qk_norm_all_heads:
        layer += q + kv
    routers = 0
    if config.experts is not None:
        gates = config.experts.count + (config.experts.shared_intermediate_size is not None)
        routers = config.layer_kinds.count(EXPERTS) * gates * hidden
    vocabulary = shard.vocab * hidden * (1 if config.tie_word_embeddings else 2)
    return vocabulary + matrices + routers + config.layers * layer + hidden


def _activations(config: ModelConfig, shard: Shard, dtype: ModelDType, tokens: int) -> int:
    """Return a layer's peak activation memory in bytes, which is reached either during attention or during
    the MLP. Both need the residual and the normalised input (2 × hidden per token). Attention also needs qkv,
    the rotated q and k in float32, q and the result. The MLP also needs gate_up, its activation and the
    result. A mixture of experts also needs a copy of the input, gate_up, its activation and the result, for
    each token and each expert that the token chooses.
    """
    width = DTYPE_BYTES[dtype]
    q, kv = shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    attention = (q + 2 * kv) * width + (q + kv) * 4 + 2 * q * width
    mlp = _feed_forward_activations(config, shard, width)
    return tokens * (2 * config.hidden_size * width + max(attention, mlp))


def _feed_forward_activations(config: ModelConfig, shard: Shard, width: int) -> int:
    """Return the size, in bytes per token, of the tensors of the MLP or the experts (see `_activations`).
    `width` is the element size in bytes."""
    mlp = (3 * shard.intermediate + config.hidden_size) * width
    if config.experts is None:
        return mlp
    experts = config.experts
    each = 3 * shard.experts(experts).width + 2 * config.hidden_size
    shared = 3 * shard.part(experts.shared_intermediate_size or 0)
    return max(mlp, (experts.top_k * each + shared) * width + experts.count * 4)


def _workspace_on_cpu(
    config: ModelConfig,
    shard: Shard,
    dtype: ModelDType,
    weights: WeightsDType,
    max_num_seqs: int,
    max_model_len: int,
) -> int:
    """Return the total size of the CPU backend's buffers in bytes: float32 logits with their copies for
    sampling, and the copies of KV blocks that attention makes in one layer. Float32 models with tied
    embeddings also need a packed copy of the output matrix, and FP8 weights need a float32 copy of one
    matrix.
    """
    kv = shard.kv_heads * config.head_dim
    outputs = max(shard.heads * config.head_dim + 2 * kv, 2 * shard.intermediate)
    copied = 4 * config.hidden_size * outputs if weights in (FP8, FP8_BLOCKS) else 0
    logits = max_num_seqs * shard.vocab * 4 * _SAMPLED_COPIES
    pages = 2 * max(kv * DTYPE_BYTES[dtype] * max_model_len, _GATHERED_BYTES)
    packed = shard.vocab * config.hidden_size * 4 if dtype == "float32" and config.tie_word_embeddings else 0
    return logits + pages + packed + copied


def _workspace_on_gpu(
    config: ModelConfig,
    shard: Shard,
    dtype: ModelDType,
    kv_cache_dtype: KvDType,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Return the total size of a GPU's buffers in bytes: two sets of logits (one for the CUDA graphs),
    processed logits in float32, penalty counts for every slot, and exclusion masks for every slot and for
    every processed slot of a step. With several ranks, logits processors need the whole vocabulary, so both
    sets of logits are also stored for all ranks. The result includes the buffer for expanding an FP8 cache,
    the CUDA graphs, and CUDA's own memory.
    """
    width = DTYPE_BYTES[dtype]
    gathered = 2 * width if shard.vocab < config.vocab_size else 0
    logits = max_num_seqs * (shard.vocab * 2 * width + config.vocab_size * (gathered + 10))
    block = shard.kv_heads * BLOCK_TOKENS * config.head_dim * width
    expansion = 2 * EXPANSION_BLOCKS * block if kv_cache_dtype == FP8 else 0
    graphs = graph_bytes(config, shard, dtype, max_num_seqs, max_num_batched_tokens)
    return logits + expansion + graphs + _CUDA_BYTES


def graph_bytes(
    config: ModelConfig, shard: Shard, dtype: ModelDType, max_num_seqs: int, max_num_batched_tokens: int
) -> int:
    """Return how many bytes the driver and the memory pools retain for CUDA graphs, excluding decode steps'
    logits.

    With 32 layers, the four graphs of one batch size take 8 to 9 MiB (measured). A prompt pass has one graph,
    with the same number of kernels. The result also includes the activations of the largest prompt pass.
    """
    prompts = prompt_capture_sizes(max_num_batched_tokens)
    working = _activations(config, shard, dtype, prompts[-1]) if prompts else 0
    return (
        len(decode_capture_sizes(max_num_seqs)) + len(prompts)
    ) * config.layers * _GRAPH_LAYER_BYTES + working


def prompt_capture_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the token counts for which prompt passes are captured as CUDA graphs. Above 1,024 tokens,
    the device takes longer to compute a pass than the host takes to launch it.
    """
    sizes = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
    return [size for size in sizes if size <= max_num_batched_tokens]


def gemm_sizes(largest: int) -> list[int]:
    """Return the row counts, up to `largest`, for which GEMM kernels are loaded at startup, and to which
    passes are padded. The counts are closer together in ranges where cuBLAS often switches kernels."""
    sizes = [*range(8, 513, 8), *range(576, 4097, 64), *range(4352, largest, 256)]
    return [size for size in sizes if size < largest] + [largest]


def layer_capture_sizes(
    config: ModelConfig, tensor_parallel_size: int, max_num_batched_tokens: int
) -> list[int]:
    """Return the token counts for which the layers of passes with prompts are captured as CUDA graphs
    (`engine.layer_graphs`).

    On several GPUs, longer passes are computed in two halves. On one GPU, a dense model's passes are not
    captured, because they take longer to compute than to launch.
    """
    sizes = [64, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 3584]
    if tensor_parallel_size == 1:
        sizes = [] if config.experts is None else [*sizes, 4096, 5120, 6144, 7168, 8192]
    return [size for size in sizes if config.layers > 1 and size <= max_num_batched_tokens]


def pass_sizes(config: ModelConfig, tensor_parallel_size: int, max_num_batched_tokens: int) -> list[int]:
    """Return the token counts to which passes with prompts are padded on a GPU: all `layer_capture_sizes`,
    and any larger `gemm_sizes`."""
    captured = layer_capture_sizes(config, tensor_parallel_size, max_num_batched_tokens)
    sizes = gemm_sizes(max_num_batched_tokens)
    return [*captured, *(size for size in sizes if not captured or size > captured[-1])]


def size_for(count: int, sizes: list[int]) -> int:
    """Return the smallest size that is at least `count`. `sizes` must be in ascending order. Raises
    IndexError if all sizes are smaller."""
    return sizes[bisect_left(sizes, count)]


def decode_capture_sizes(largest: int) -> list[int]:
    """Return the batch sizes, up to `largest`, for which decode steps are captured as CUDA graphs: 1, 2, 4,
    8, 12 and 16, then in steps of 8 up to 64, then four sizes per power of two. The last size is `largest`.

    Large GEMMs compute tiles of 64 or 128 rows, so powers of two are among the sizes. With a 70B model on
    four H100s, a step of 256 rows took 22 to 24 ms in a graph of 264 rows, because each GEMM computed a third
    tile.
    """
    sizes = [size for size in (1, 2, 4, 8, 12, 16) if size < largest]
    size = 24
    while size < largest:
        sizes.append(size)
        size += max(8, (1 << size.bit_length()) // 8)
    return [*sizes, largest]


def peer_bytes(tensor_parallel_size: int) -> int:
    """Return the size in bytes of the memory through which a GPU exchanges messages with the other GPUs in
    its group."""
    return PEER_ARENA_BYTES * tensor_parallel_size if tensor_parallel_size > 1 else 0


def overlap_split(tokens: int) -> int:
    """Return the number of tokens in the first half of a pass that overlaps its all-reduces with
    computation."""
    return -(-tokens // (2 * _SPLIT_TOKENS)) * _SPLIT_TOKENS


def overlap_bytes(
    config: ModelConfig, dtype: ModelDType, tensor_parallel_size: int, max_num_batched_tokens: int
) -> int:
    """Return the size, in bytes per GPU, of the buffers for overlapped sums. Each half needs space for this
    rank's part, for all ranks' parts of the rows that this rank sums, and for two results
    (`engine.peer_overlap.PeerOverlap`)."""
    if tensor_parallel_size == 1 or max_num_batched_tokens < OVERLAP_FROM_TOKENS:
        return 0
    return 2 * 4 * overlap_split(max_num_batched_tokens) * config.hidden_size * DTYPE_BYTES[dtype]


def captured_bytes(
    config: ModelConfig, dtype: ModelDType, tensor_parallel_size: int, max_num_batched_tokens: int
) -> int:
    """Return the number of bytes per GPU used by the captured layers and halves of passes with prompts
    (`engine.layer_graphs`, `engine.halves_graphs`). This includes the buffers between the graphs, the graphs'
    memory for computing an MLP or experts, and the graphs themselves (as in `graph_bytes`). Passes in halves
    are captured for two token counts.
    """
    sizes = layer_capture_sizes(config, tensor_parallel_size, max_num_batched_tokens)
    if not sizes:
        return 0
    shard, width = config.shard(tensor_parallel_size, 0), DTYPE_BYTES[dtype]
    # A layer's buffers also include an int64 per token that marks padding.
    attention = 2 * (shard.heads + shard.kv_heads) * config.head_dim * width + 8
    mlp = _feed_forward_activations(config, shard, width)
    count, graphs = sizes[-1] * (config.hidden_size * width + attention + mlp), len(sizes)
    if tensor_parallel_size > 1 and max_num_batched_tokens >= OVERLAP_FROM_TOKENS:
        count += overlap_split(max_num_batched_tokens) * (2 * attention + mlp)
        graphs += 2 * 2
    return count + graphs * config.layers * _GRAPH_LAYER_BYTES


def _tables(config: ModelConfig, max_num_seqs: int, max_model_len: int) -> int:
    """Return the size in bytes of the block tables (8 bytes for each block of each slot), other slot state
    (about 128 bytes per slot) and the float32 rotary table."""
    blocks = -(-max_model_len // BLOCK_TOKENS)
    return max_num_seqs * (8 * blocks + 128) + max_model_len * config.head_dim * 4
