"""Defines a model together with its serving options, which determine the kernels that a replica launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.config import ROUTED, ModelConfig, UnsupportedError
from engine.messages import ModelDType
from kernels import limits

if TYPE_CHECKING:
    from kernels.compiling import GpuModel

DTYPES = ("bfloat16", "float16")
"""Model dtypes that the GPU kernels support."""

_WITHOUT_KERNELS = "on the CPU, or in float32, which does not use the GPU kernels"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """A model and its serving options, for all ranks of a replica. Replicas with equal fields launch the same
    kernels on the same GPU."""

    config: ModelConfig
    dtype: ModelDType
    """Dtype of the model."""
    fp8: bool = False
    """Whether the layers' matrices are quantised to e4m3."""
    fp8_blocks: bool = False
    """Whether quantised matrices have one scale per block instead of one scale per output."""
    kv_fp8: bool = False
    """Whether the KV cache is quantised to e4m3."""
    tensor_parallel_size: int = 1
    max_num_seqs: int
    """Maximum number of running sequences."""
    max_num_batched_tokens: int
    """Token budget of a step."""

    def check_shapes(self) -> None:
        """Raise UnsupportedError if the model cannot be split across the ranks, or is not supported by the
        GPU kernels. The message gives the field of `config.json`, its value and the remedy."""
        config, size = self.config, self.tensor_parallel_size
        shard = config.shard(size, 0)
        group, experts = shard.heads // shard.kv_heads, config.experts
        serve = f"serve this model {_WITHOUT_KERNELS}"
        serve_unquantised = f"serve this model with weights that are not FP8, {_WITHOUT_KERNELS}"
        problem: tuple[str, str] | None = None
        if config.head_dim not in limits.HEAD_DIMS:
            served = ", ".join(map(str, limits.HEAD_DIMS))
            problem = f"head_dim is {config.head_dim}; the GPU kernels support {served}", serve
        elif group > limits.MAX_GROUP:
            problem = (
                f"num_attention_heads is {config.heads} and num_key_value_heads is {config.kv_heads}; the "
                f"GPU kernels support at most {limits.MAX_GROUP} query heads per KV head, not {group}",
                serve,
            )
        elif config.hidden_size > limits.LARGEST_ROW:
            problem = (
                f"hidden_size is {config.hidden_size}; the GPU kernels support at most {limits.LARGEST_ROW}",
                serve,
            )
        elif self.fp8 and config.hidden_size % limits.FP8_ALIGNMENT:
            problem = (
                f"hidden_size is {config.hidden_size}; FP8 weights on a GPU need a multiple of "
                f"{limits.FP8_ALIGNMENT}",
                serve_unquantised,
            )
        elif experts is not None and experts.count > limits.MAX_EXPERTS:
            has = f"{experts.count_field} is {experts.count}"
            problem = f"{has}; the GPU kernels support at most {limits.MAX_EXPERTS}", serve
        elif experts is not None and experts.top_k > limits.MAX_TOP_K:
            most = limits.MAX_TOP_K
            problem = f"num_experts_per_tok is {experts.top_k}; the GPU kernels support at most {most}", serve
        for kind, name, width in config.mlp_widths if self.fp8 and problem is None else ():
            whole = kind == ROUTED and experts is not None and experts.whole
            part = width if whole else shard.part(width)
            each = f" ({part} on each of {size} ranks)" if part != width else ""
            if part % limits.FP8_ALIGNMENT:
                allowed = f"need a multiple of {limits.FP8_ALIGNMENT}"
            elif part > limits.LARGEST_ROW:
                allowed = f"allow at most {limits.LARGEST_ROW}"
            else:
                continue
            problem = f"{name} is {width}{each}; FP8 weights on a GPU {allowed}", serve_unquantised
        if problem is not None:
            raise UnsupportedError(*problem)

    def check_gpu(self, gpu: GpuModel) -> None:
        """Raise UnsupportedError if the GPU does not support this model's kernels."""
        capability = gpu.target.arch
        version = capability / 10
        elsewhere = f"serve this model on another GPU, {_WITHOUT_KERNELS}"
        if capability < limits.MIN_CAPABILITY:
            raise UnsupportedError(
                f"{gpu.name} has compute capability {version}; the GPU kernels need at least "
                f"{limits.MIN_CAPABILITY / 10}",
                elsewhere,
            )
        if self.config.head_dim > 128 and gpu.shared_bytes < limits.WIDE_HEADS_SHARED:
            raise UnsupportedError(
                f"head_dim is {self.config.head_dim}, so attention needs {limits.WIDE_HEADS_SHARED >> 10} "
                f"KiB of shared memory per program, but {gpu.name} (compute capability {version}) has only "
                f"{gpu.shared_bytes >> 10} KiB",
                elsewhere,
            )
        if capability < limits.MIN_FP8_CAPABILITY and (self.fp8 or self.kv_fp8):
            description = "weights are fp8" if self.fp8 else "kv_cache_dtype is fp8"
            whole = "weights that are not FP8" if self.fp8 else 'kv_cache_dtype "auto"'
            raise UnsupportedError(
                f"{description}, but {gpu.name} has compute capability {version}; FP8 needs at least "
                f"{limits.MIN_FP8_CAPABILITY / 10}",
                f"serve this model with {whole}, or on another GPU",
            )
