"""Computes each kernel's minimum memory traffic and number of operations from the shapes of the steps.

Kernels are recognised by name. Triton kernels are named after their functions, and library GEMM names contain
"gemm" or a similar substring. A layer's GEMMs are told apart by their order, which is the same in every step.
For an MoE layer, the traffic is based on the expected number of experts chosen in a step, assuming that all
experts are equally likely to be chosen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import cycle

from engine.ceilings import Ceilings, expected_experts
from engine.config import DTYPE_BYTES, EXPERTS, ExpertsConfig, ModelConfig
from engine.messages import BLOCK_TOKENS, ReplicaInfo
from engine.profile.steps import StepShape
from engine.sizing import EXPANSION_BLOCKS, FP8

_TRITON_GEMMS = ("_gemv", "_dot", "_stream", "_tiles")
_LIBRARY_GEMM = re.compile(r"gemm|gemv|nvjet|cutlass|xmma", re.IGNORECASE)
_REDUCTION = re.compile(r"reduce", re.IGNORECASE)
"""Matches the name of the reduction kernel that follows a split-K library GEMM."""
_EXPERTS_KERNELS = {
    "_route": "route",
    "_logits": "route",
    "_choose": "choose",
    "_up_gemv": "experts up",
    "_up_stream": "experts up",
    "_up_dot": "experts up",
    "_down_gemv": "experts down",
    "_down_stream": "experts down",
    "_down_dot": "experts down",
    "_combine": "combine",
}
"""Labels for the kernels of a mixture-of-experts layer."""
_GROUPED = "_grouped"
"""The kernel that a mixture-of-experts layer launches twice: first for "experts up", then for "experts
down"."""
_PLACE = "_place"
"""Name shared by two kernels: the last kernel of "sort", which runs directly before "experts up", and a
kernel at the start of decode steps."""
_ALL_GEMMS = "gemms"
"""Label for GEMMs that cannot be distinguished."""


@dataclass(frozen=True, slots=True)
class KernelWork:
    """A kernel's memory traffic (in bytes) and number of operations, summed over all of its calls."""

    bytes: float
    operations: float = 0.0
    per_s: float | None = None
    """The device's peak rate for the kernel's operations, in operations per second, or None if the operations
    cannot be the bottleneck."""

    def __add__(self, other: KernelWork) -> KernelWork:
        return KernelWork(self.bytes + other.bytes, self.operations + other.operations, self.per_s)

    def limit_us(self, device: Ceilings) -> float:
        """Return the minimum time, in microseconds, that a device needs for this work."""
        seconds = self.bytes / device.bytes_per_s
        if self.per_s is not None:
            seconds = max(seconds, self.operations / self.per_s)
        return 1e6 * seconds


def label_kernels(names: list[str], config: ModelConfig, shapes: Sequence[StepShape]) -> list[str]:
    """Return the kernel names, with each GEMM labelled by its weights (qkv, o, gate_up, down or lm_head), and
    each kernel of a mixture of experts labelled by what it computes.

    `names` are the kernels in execution order. If the number of GEMMs does not match the shapes of the steps,
    all GEMMs are labelled "gemms".
    """
    places = [index for index, name in enumerate(names) if is_gemm(name)]
    expected = []
    for shape in shapes:
        expected += _layer_gemms(config) + ["lm_head"] * bool(shape.logit_rows)
    if len(expected) != len(places):
        expected = [_ALL_GEMMS] * len(places)
    labels = dict(zip(places, expected, strict=True))
    grouped = cycle(("experts up", "experts down"))
    for index, name in enumerate(names):
        if name in _EXPERTS_KERNELS:
            labels[index] = _EXPERTS_KERNELS[name]
        elif name == _GROUPED:
            labels[index] = next(grouped)
        elif name == _PLACE and names[index + 1 : index + 2] == [_GROUPED]:
            labels[index] = "sort"
    return [f"{labels[index]} ({name})" if index in labels else name for index, name in enumerate(names)]


def _layer_gemms(config: ModelConfig) -> list[str]:
    """Return the labels of all layers' GEMMs, in execution order."""
    shared = config.experts is not None and config.experts.shared_intermediate_size is not None
    of_experts = ["shared gate", "shared gate_up", "shared down"] if shared else []
    labels = []
    for kind in config.layer_kinds:
        labels += ["qkv", "o", *(of_experts if kind == EXPERTS else ["gate_up", "down"])]
    return labels


def is_gemm(name: str) -> bool:
    """Return whether a kernel is a GEMM with a single weight matrix. Expert kernels have several."""
    if name in _EXPERTS_KERNELS:
        return False
    return name in _TRITON_GEMMS or (
        _LIBRARY_GEMM.search(name) is not None and _REDUCTION.search(name) is None
    )


def work_by_kernel(
    config: ModelConfig,
    info: ReplicaInfo,
    shapes: Sequence[StepShape],
    device: Ceilings | None,
    norms: float | None = None,
    launched: Collection[str] = (),
) -> dict[str, KernelWork]:
    """Return the work of each kernel or label on rank 0, summed over all `shapes`. `norms` is the number of
    norm kernels launched per step, which is lower if some norms are fused into GEMMs; None assumes one launch
    per norm. `launched` contains the names of all launched kernels: the work of some kernels depends on
    whether another kernel ran, e.g. the Hopper attention kernel.

    The result is approximate in two respects. Captured passes never use the Hopper kernel, but are counted as
    if they did. Chunks that read an FP8 cache directly are counted as if it had been expanded first.
    """
    made: dict[str, KernelWork] = {}
    config = _of_rank(config, info.tensor_parallel_size)
    for shape in shapes:
        of_tokens = 2 * config.layers if norms is None else norms - bool(shape.logit_rows)
        for name, work in _of_step(config, info, shape, device, of_tokens, launched).items():
            made[name] = made[name] + work if name in made else work
    return made


def _of_rank(config: ModelConfig, ranks: int) -> ModelConfig:
    """Return the configuration of rank 0's model shard."""
    shard = config.shard(max(1, ranks), 0)
    experts = config.experts
    if experts is not None:
        shared = experts.shared_intermediate_size
        experts = replace(
            experts,
            intermediate_size=shard.part(experts.intermediate_size),
            shared_intermediate_size=None if shared is None else shard.part(shared),
        )
    return replace(
        config,
        heads=shard.heads,
        kv_heads=shard.kv_heads,
        intermediate_size=shard.intermediate,
        vocab_size=shard.vocab,
        experts=experts,
    )


def _of_step(
    config: ModelConfig,
    info: ReplicaInfo,
    shape: StepShape,
    device: Ceilings | None,
    norms: float,
    launched: Collection[str],
) -> dict[str, KernelWork]:
    """Return each kernel's work in one step. `norms` is the number of norm launches over all tokens."""
    tokens, rows, layers = shape.tokens, shape.logit_rows, config.layers
    # The last layer writes keys and values for all tokens, but computes results only for tokens that need
    # logits.
    results = len(shape.contexts) + len(shape.chunks)
    through = [tokens] * (layers - 1) + [results]
    kinds = list(zip(through, config.layer_kinds, strict=True))
    dense = [count for count, kind in kinds if kind != EXPERTS]
    sparse = [count for count, kind in kinds if kind == EXPERTS]
    fp8, number = info.weights != info.dtype, DTYPE_BYTES[info.dtype]
    weight = 1 if fp8 else number
    # Size in bytes of one token's key or value in one head. An FP8 cache adds a scale.
    of_kv = config.head_dim + 4 if info.kv_cache_dtype == FP8 else config.head_dim * number
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, both = config.heads * config.head_dim, 2 * config.kv_heads
    fast = slow = attention = None
    if device is not None:
        slow, attention = device.gemm_per_s, device.attention_per_s
        fast = device.fp8_gemm_per_s if fp8 else slow

    def product(n: int, k: int, count: int, out: int, item: int, per_s: float | None) -> KernelWork:
        moved = n * k * item + count * (k * item + out * number)
        return KernelWork(moved, 2.0 * count * n * k, per_s)

    def layer(n: int, k: int, out: int, counts: Sequence[int]) -> KernelWork:
        """Return the total work of one GEMM in several layers. `counts` is the number of tokens in each
        layer."""
        return sum((product(n, k, count, out, weight, fast) for count in counts), KernelWork(0, 0, fast))

    seen = [_seen(context, 1, window) for context in shape.contexts for window in config.sliding_windows]
    seen += [_seen(context + count, 1, config.sliding_windows[-1]) for context, count in shape.chunks]
    hopper = "_prefill_hopper" in launched
    own = {window: hopper and _suits_hopper(config, info, shape, window) for window in config.sliding_windows}
    pairs, pages = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}
    for context, count in shape.chunks:
        for window in config.sliding_windows[:-1]:
            pairs[own[window]] += _pairs(context, count, window)
            pages[own[window]] += _seen(context + count, count, window)
    new = both * (config.head_dim * number + of_kv)
    asked = layers * len(shape.contexts) + len(shape.chunks)
    decodes = asked * (2 * q * number + (0 if shape.chunks else new))
    qkv = (config.heads + both) * config.head_dim
    made = {
        "qkv": layer(qkv, hidden, qkv, [tokens] * layers),
        "o": layer(hidden, q, 2 * hidden, through),
        "gate_up": layer(2 * intermediate, hidden, intermediate, dense),
        "down": layer(hidden, intermediate, 2 * hidden, dense),
        "lm_head": product(config.vocab_size, hidden, rows, config.vocab_size, number, slow),
        "_norm": KernelWork(((norms - 1) * tokens + results + rows) * hidden * 2 * number),
        "_silu_mul": KernelWork(sum(dense) * intermediate * 3 * number),
        "_quantise": KernelWork((sum(through) * q + sum(dense) * intermediate) * (number + 1)),
        "_rope": KernelWork(layers * tokens * (2 * q * number + new)),
        "decode_kernel": KernelWork(sum(seen) * both * of_kv + decodes, 4.0 * sum(seen) * q, attention),
        "_prefill_kernel": KernelWork(pages[False] * both * of_kv, 4.0 * pairs[False] * q, attention),
        "_prefill_hopper": KernelWork(pages[True] * both * of_kv, 4.0 * pairs[True] * q, attention),
        "_expand_kernel": KernelWork(sum(pages.values()) * both * (of_kv + config.head_dim * number)),
        "scan_kernel": KernelWork(rows * config.vocab_size * number),
    }
    gemms = [made[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")]
    experts = config.experts
    if experts is not None:
        works = [_of_mixture(experts, hidden, count, number, weight, launched) for count in sparse]
        for name, per_s in (("route", slow), ("experts up", fast), ("experts down", fast)):
            made[name] = sum((work[name] for work in works), KernelWork(0, 0, per_s))
        for name in ("choose", "sort", "combine", "_quantise"):
            made[name] = sum((work[name] for work in works), made.get(name, KernelWork(0)))
        if experts.shared_intermediate_size is not None:
            shared, gate = experts.shared_intermediate_size, KernelWork(0, 0, slow)
            made["shared gate"] = sum((product(1, hidden, n, 1, number, slow) for n in sparse), gate)
            made["shared gate_up"] = layer(2 * shared, hidden, shared, sparse)
            made["shared down"] = layer(hidden, shared, 2 * hidden, sparse)
            gemms += [made[name] for name in ("shared gate", "shared gate_up", "shared down")]
            made["_silu_mul"] += KernelWork(sum(sparse) * shared * 3 * number)
            made["_quantise"] += KernelWork(sum(sparse) * shared * (number + 1))
    made[_ALL_GEMMS] = KernelWork(sum(one.bytes for one in gemms), sum(one.operations for one in gemms), fast)
    return made


def _of_mixture(
    experts: ExpertsConfig, hidden: int, tokens: int, number: int, weight: int, launched: Collection[str]
) -> dict[str, KernelWork]:
    """Return the work of each kernel in one mixture-of-experts layer. `number` and `weight` are the sizes, in
    bytes, of an activation element and of an expert weight element."""
    count, top_k, width = experts.count, experts.top_k, experts.intermediate_size
    choices, matrix = tokens * top_k, hidden * width
    read = expected_experts(experts, tokens) * matrix * weight
    # After GEMMs on sorted tokens, "combine" adds the results of each token's experts to the residual.
    written = choices if _GROUPED in launched else 2 * tokens
    # Some kernels quantise their own results.
    quantised = choices * width * {"_down_gemv", "_down_stream"}.isdisjoint(launched)
    return {
        "route": KernelWork(
            count * hidden * number + tokens * (hidden * number + 8 * top_k), 2.0 * tokens * count * hidden
        ),
        "choose": KernelWork(4 * tokens * count + 8 * choices),
        "sort": KernelWork(12 * choices),
        "experts up": KernelWork(
            2 * read + tokens * hidden * weight + choices * width * number, 4.0 * choices * matrix
        ),
        "experts down": KernelWork(
            read + choices * width * weight + written * hidden * number, 2.0 * choices * matrix
        ),
        "combine": KernelWork((choices + 2 * tokens) * hidden * number),
        "_quantise": KernelWork(quantised * (number + 1)),
    }


def _suits_hopper(config: ModelConfig, info: ReplicaInfo, shape: StepShape, window: int | None) -> bool:
    """Return whether a pass uses the Hopper attention kernel. Must agree with `kernels.cuda`."""
    # Imported here because these modules load Triton, which is not needed on a CPU.
    from engine.model.decoder import TORCH_DTYPES
    from kernels import ChunkSpan
    from kernels.triton.attention_prefill import plan_expansion, plan_tiles, suits_hopper

    heads = (config.heads, config.kv_heads)
    chunks = [ChunkSpan(0, count, context, 0) for context, count in shape.chunks]
    if info.kv_cache_dtype == FP8:
        tiles = plan_expansion(chunks, *heads, window, EXPANSION_BLOCKS).expanded
    else:
        tiles = plan_tiles(chunks, *heads, window)
    return suits_hopper(tiles, *heads, config.head_dim, TORCH_DTYPES[info.dtype], window)


def _seen(context: int, count: int, window: int | None) -> int:
    """Return the number of cached tokens that are attended to by the last `count` tokens of a context of
    `context` tokens, rounded up to whole KV blocks."""
    reach = context if window is None else min(context, window - 1 + count)
    return -(-reach // BLOCK_TOKENS) * BLOCK_TOKENS


def _pairs(context: int, count: int, window: int | None) -> float:
    """Return the number of (query, key) pairs in the attention of `count` tokens that follow `context`
    tokens."""
    whole = count * context + count * (count + 1) / 2
    if window is None:
        return whole
    return float(sum(min(window, context + place) for place in range(1, count + 1)))
