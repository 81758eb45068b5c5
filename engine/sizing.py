"""How much memory a model takes, before it is loaded: the formulas, all in bytes a rank. No torch.

Weights and KV are exact. Working memory is an estimate of the largest tensors alive at once in the largest
step; a replica logs the difference to what it measured.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from engine.config import DTYPE_BYTES, ModelConfig, Shard
from engine.families import read_config
from engine.messages import BLOCK_TOKENS

__all__ = ["Sizing", "kv_bytes_per_block", "ladder", "parameters", "predict", "read_config"]

FP8 = "fp8"
"""Weights or KV in e4m3 with float32 scales."""

EXPANSION_BLOCKS = 1024
"""Blocks of an FP8 cache that a pass with prompts expands to the model's dtype at once, on a GPU."""

_GATHERED_BYTES = 4 << 20
"""The CPU backend copies at most so many bytes of keys at once, or one sequence's (`kernels.reference`)."""

_SAMPLED_COPIES = 4
"""Float32 copies of a logit row while it is sampled on a CPU: logits, noise, sorted, cumulated."""

_GRAPH_LAYER_BYTES = 300 << 10
_CUDA_BYTES = 700 << 20
"""Context, modules and library workspaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """One rank's memory, in bytes."""

    weight_bytes: int
    kv_bytes_per_block: int
    kv_blocks: int
    """As given to `predict`; 0 where it was None."""
    activation_bytes: int
    """Hidden states, projections, logits and attention's workspace in a step with a full token budget."""
    table_bytes: int
    """Rows' tables and the rotary table."""

    @property
    def kv_bytes(self) -> int:
        return self.kv_blocks * self.kv_bytes_per_block

    @property
    def fixed_bytes(self) -> int:
        """Everything but KV."""
        return self.weight_bytes + self.activation_bytes + self.table_bytes

    @property
    def total_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


def parameters(config: ModelConfig) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    return _parameters(config, config.shard(1, 0))


def kv_bytes_per_block(config: ModelConfig, kv_dtype: str, tensor_parallel_size: int) -> int:
    """Keys and values of BLOCK_TOKENS tokens in all layers: `2 × layers × KV heads on the rank × 64 ×
    head_dim` elements, and with "fp8" a float32 scale for each token and head. The same on every rank."""
    shard = config.shard(tensor_parallel_size, 0)
    head = config.head_dim + 4 if kv_dtype == FP8 else config.head_dim * DTYPE_BYTES[kv_dtype]
    return 2 * config.layers * shard.kv_heads * BLOCK_TOKENS * head


def predict(
    config: ModelConfig,
    *,
    dtype: str,
    weights: str,
    kv_dtype: str,
    tensor_parallel_size: int,
    max_rows: int,
    step_tokens: int,
    max_model_len: int,
    blocks: int | None,
    on_gpu: bool,
) -> Sizing:
    """Memory of the rank with the most, which is rank 0 (it alone has the biases of reduced products).

    dtype: the model's, of engine.config.DTYPE_BYTES. weights, kv_dtype: the same, or "fp8". max_rows:
    sequences at once; step_tokens: token budget of a step; max_model_len: the longest sequence; blocks: of
    the pool, None where they are yet to be found; on_gpu: whether it runs there. Raises UnfitError
    when the model cannot be split.
    """
    shard = config.shard(tensor_parallel_size, 0)
    return Sizing(
        weight_bytes=weight_bytes(config, shard, dtype, weights),
        kv_bytes_per_block=kv_bytes_per_block(config, kv_dtype, tensor_parallel_size),
        kv_blocks=blocks or 0,
        activation_bytes=_step(config, shard, dtype, max(step_tokens, max_rows))
        + (
            _beside_on_gpu(config, shard, dtype, kv_dtype, max_rows, step_tokens)
            if on_gpu
            else _beside_on_cpu(config, shard, dtype, weights, max_rows, max_model_len)
        ),
        table_bytes=_tables(config, max_rows, max_model_len),
    )


def weight_bytes(config: ModelConfig, shard: Shard, dtype: str, weights: str) -> int:
    """Of all weights of a rank. dtype: of embeddings, norms and the output matrix; weights: of the layers'
    matrices, the same or "fp8"."""
    width = DTYPE_BYTES[dtype]
    if weights != FP8:
        return _parameters(config, shard) * width
    matrices = config.layers * _matrices(config, shard)
    hidden, q, kv = config.hidden_size, shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    outputs = config.layers * (q + 2 * kv + hidden + 2 * shard.intermediate + hidden)
    return matrices + 4 * outputs + (_parameters(config, shard) - matrices) * width


def _matrices(config: ModelConfig, shard: Shard) -> int:
    """Elements of a layer's qkv, o, gate, up and down."""
    hidden, q, kv = config.hidden_size, shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    return hidden * (q + 2 * kv) + q * hidden + 3 * hidden * shard.intermediate


def _parameters(config: ModelConfig, shard: Shard) -> int:
    """Elements of the tensors that `engine.model.decoder` makes on this rank, padding of the vocabulary
    included.

    A layer: its matrices, two norms, and where the family has them biases and QK-norms.
    """
    hidden, q, kv = config.hidden_size, shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    layer = _matrices(config, shard) + 2 * hidden
    first = shard.rank == 0
    if config.qkv_bias:
        layer += q + 2 * kv
    if config.o_bias and first:
        layer += hidden
    if config.mlp_bias:
        layer += 2 * shard.intermediate + (hidden if first else 0)
    if config.qk_norm:
        layer += 2 * config.head_dim
    vocabulary = shard.vocab * hidden * (1 if config.tie_word_embeddings else 2)
    return vocabulary + config.layers * layer + hidden


def _step(config: ModelConfig, shard: Shard, dtype: str, tokens: int) -> int:
    """The larger of the two moments of a layer.

    In both, residual and normed input (2 × hidden a token) live. Attention: qkv, rotated q and k in float32,
    q and the result. MLP: gate_up, its activation and the result.
    """
    width = DTYPE_BYTES[dtype]
    q, kv = shard.heads * config.head_dim, shard.kv_heads * config.head_dim
    attention = (q + 2 * kv) * width + (q + kv) * 4 + 2 * q * width
    mlp = 3 * shard.intermediate * width + config.hidden_size * width
    return tokens * (2 * config.hidden_size * width + max(attention, mlp))


def _beside_on_cpu(
    config: ModelConfig, shard: Shard, dtype: str, weights: str, max_rows: int, max_model_len: int
) -> int:
    """Logits in float32, in the copies that sampling makes; the pages of one layer that attention copies; a
    float32 model with tied embeddings keeps a packed copy of the output matrix; products with FP8 weights
    make a float32 copy of the matrix."""
    kv = shard.kv_heads * config.head_dim
    outputs = max(shard.heads * config.head_dim + 2 * kv, 2 * shard.intermediate)
    copied = 4 * config.hidden_size * outputs if weights == FP8 else 0
    logits = max_rows * shard.vocab * 4 * _SAMPLED_COPIES
    pages = 2 * max(kv * DTYPE_BYTES[dtype] * max_model_len, _GATHERED_BYTES)
    packed = shard.vocab * config.hidden_size * 4 if dtype == "float32" and config.tie_word_embeddings else 0
    return logits + pages + packed + copied


def _beside_on_gpu(
    config: ModelConfig, shard: Shard, dtype: str, kv_dtype: str, max_rows: int, step_tokens: int
) -> int:
    """Return the bytes of logits, twice (those of the graphs are their own), of edited logits in float32,
    penalty counts and exclusions (a row's and a step's) where every row has them, of the expansion of an FP8
    cache, of the graphs, and of what CUDA takes for itself."""
    width = DTYPE_BYTES[dtype]
    logits = max_rows * shard.vocab * (2 * width + 10)
    block = shard.kv_heads * BLOCK_TOKENS * config.head_dim * width
    expansion = 2 * EXPANSION_BLOCKS * block if kv_dtype == FP8 else 0
    graphs = graph_bytes(config, shard, dtype, max_rows, step_tokens)
    return logits + expansion + graphs + _CUDA_BYTES


def graph_bytes(config: ModelConfig, shard: Shard, dtype: str, max_rows: int, step_tokens: int) -> int:
    """What the driver and the graphs' pools keep, the decode steps' logits aside. Measured with 32 layers: 8
    to 9 MiB a batch size, in four graphs, and what those work with. A pass of prompts has one graph, of as
    many kernels; the largest one's working memory is counted beside it."""
    prompts = prompt_ladder(step_tokens)
    working = _step(config, shard, dtype, prompts[-1]) if prompts else 0
    return (len(ladder(max_rows)) + len(prompts)) * config.layers * _GRAPH_LAYER_BYTES + working


def prompt_ladder(step_tokens: int) -> list[int]:
    """Numbers of tokens at which passes of prompts get graphs. Above 1,024 the device takes longer than the
    host."""
    sizes = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
    return [size for size in sizes if size <= step_tokens]


def product_ladder(most: int) -> list[int]:
    """Numbers of rows at which a GPU library is asked for its products before anybody waits for them, up to
    `most`: close together where its choice of kernels follows them closely."""
    sizes = [*range(8, 513, 8), *range(576, 4097, 64), *range(4352, most, 256)]
    return [size for size in sizes if size < most] + [most]


def size_for(count: int, sizes: list[int]) -> int:
    """The first of `sizes`, which rise, that is at least `count`. Raises IndexError where none is."""
    return sizes[bisect_left(sizes, count)]


def ladder(most: int) -> list[int]:
    """Batch sizes that get graphs: 1, 2, 4, 8, 12, 16, then steps of about an eighth, up to `most`."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16) if size < most]
    step = 8
    while (sizes[-1] if sizes else 0) < most:
        last = sizes[-1] if sizes else 0
        while step < last // 8:
            step *= 2
        sizes.append(min(most, last + step))
    return sizes


def _tables(config: ModelConfig, max_rows: int, max_model_len: int) -> int:
    """Block tables (8 bytes a row and block), rows' scalars (about 128 bytes), and the rotary table
    (float32)."""
    blocks = -(-max_model_len // BLOCK_TOKENS)
    return max_rows * (8 * blocks + 128) + max_model_len * config.head_dim * 4
