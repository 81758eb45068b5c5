"""What kernels must at least read, write and compute in steps of known shape: by kernel, from the shapes.

Kernels are told by their names: ours are Triton's function names, the library's products have "gemm" or the
like in theirs. The products of a layer are told apart by their order, which is the same in every step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from engine.bench.limits import Ceilings
from engine.config import DTYPE_BYTES, ModelConfig
from engine.messages import BLOCK_TOKENS, ReplicaInfo
from engine.profile.steps import StepShape
from engine.sizing import EXPANSION_BLOCKS, FP8

_OURS = ("_gemv", "_dot", "_stream", "_tiles")
_LIBRARYS = re.compile(r"gemm|gemv|nvjet|cutlass|xmma", re.IGNORECASE)
_AFTER = re.compile(r"reduce", re.IGNORECASE)
"""Follows a library's product that is split over K."""
_UNTOLD = "products"


@dataclass(frozen=True, slots=True)
class Work:
    """Of all calls of a kernel together."""

    bytes: float
    operations: float = 0.0
    per_s: float | None = None
    """The most operations that the device does in a second, where operations may be the limit."""

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations, self.per_s)

    def limit_us(self, device: Ceilings) -> float:
        """The least time that this takes."""
        seconds = self.bytes / device.bytes_per_s
        if self.per_s is not None:
            seconds = max(seconds, self.operations / self.per_s)
        return 1e6 * seconds


def label_products(names: Sequence[str], layers: int, shapes: Sequence[StepShape]) -> list[str]:
    """`names` of kernels in order, those of products replaced by what they multiply with: qkv, o, gate_up,
    down, lm_head. Where there are not as many as the steps have, all are called "products"."""
    places = [index for index, name in enumerate(names) if is_product(name)]
    expected = []
    for shape in shapes:
        expected += ["qkv", "o", "gate_up", "down"] * layers + ["lm_head"] * bool(shape.logit_rows)
    if len(expected) != len(places):
        expected = [_UNTOLD] * len(places)
    labelled = list(names)
    for place, label in zip(places, expected, strict=True):
        labelled[place] = f"{label} ({names[place]})"
    return labelled


def is_product(name: str) -> bool:
    return name in _OURS or (_LIBRARYS.search(name) is not None and _AFTER.search(name) is None)


def work_by_kernel(
    config: ModelConfig,
    info: ReplicaInfo,
    shapes: Sequence[StepShape],
    device: Ceilings | None,
    norms: float | None = None,
    hopper: bool = False,
) -> dict[str, Work]:
    """What all `shapes` together make of each kernel, by its name or the product's, on the only rank.

    norms: launches of a norm in a step, where products share some; None: every norm is one. hopper: whether
    long prompts are read by Hopper's own kernel; those of captured passes, which never are, count as if they
    were. Of an FP8 cache, chunks that are read as they are count as if expanded beside the others."""
    made: dict[str, Work] = {}
    for shape in shapes:
        of_tokens = 2 * config.layers if norms is None else norms - bool(shape.logit_rows)
        for name, work in _of_step(config, info, shape, device, of_tokens, hopper).items():
            made[name] = made[name] + work if name in made else work
    return made


def _of_step(
    config: ModelConfig,
    info: ReplicaInfo,
    shape: StepShape,
    device: Ceilings | None,
    norms: float,
    hopper: bool,
) -> dict[str, Work]:
    """norms: launches of a norm of all tokens."""
    tokens, rows, layers = shape.tokens, shape.logit_rows, config.layers
    # In the last layer only the ends of prompts go on behind the cache.
    results = len(shape.contexts) + len(shape.chunks)
    through = (layers - 1) * tokens + results
    fp8, number = info.weights == FP8, DTYPE_BYTES[info.dtype]
    weight = 1 if fp8 else number
    # Of a token's key or value in one head; with FP8, a scale beside it.
    of_kv = config.head_dim + 4 if info.kv_dtype == FP8 else config.head_dim * number
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q, both = config.heads * config.head_dim, 2 * config.kv_heads
    fast = slow = attention = None
    if device is not None:
        slow, attention = device.products_per_s, device.attention_per_s
        fast = device.fp8_products_per_s if fp8 else slow

    def product(n: int, k: int, count: int, out: int, item: int, per_s: float | None) -> Work:
        moved = n * k * item + count * (k * item + out * number)
        return Work(moved, 2.0 * count * n * k, per_s)

    def layer(n: int, k: int, out: int, last: int) -> Work:
        one, end = (product(n, k, count, out, weight, fast) for count in (tokens, last))
        return Work(
            (layers - 1) * one.bytes + end.bytes, (layers - 1) * one.operations + end.operations, fast
        )

    seen = [_seen(context, 1, window) for context in shape.contexts for window in config.sliding_windows]
    seen += [_seen(context + count, 1, config.sliding_windows[-1]) for context, count in shape.chunks]
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
        "qkv": layer(qkv, hidden, qkv, tokens),
        "o": layer(hidden, q, 2 * hidden, results),
        "gate_up": layer(2 * intermediate, hidden, intermediate, results),
        "down": layer(hidden, intermediate, 2 * hidden, results),
        "lm_head": product(config.vocab_size, hidden, rows, config.vocab_size, number, slow),
        "_norm": Work(((norms - 1) * tokens + results + rows) * hidden * 2 * number),
        "_silu_mul": Work(through * intermediate * 3 * number),
        "_quantise": Work(through * (q + intermediate) * (number + 1)),
        "_rope": Work(layers * tokens * (2 * q * number + new)),
        "decode_kernel": Work(sum(seen) * both * of_kv + decodes, 4.0 * sum(seen) * q, attention),
        "_prefill_kernel": Work(pages[False] * both * of_kv, 4.0 * pairs[False] * q, attention),
        "_prefill_hopper": Work(pages[True] * both * of_kv, 4.0 * pairs[True] * q, attention),
        "_expand_kernel": Work(sum(pages.values()) * both * (of_kv + config.head_dim * number)),
        "scan_kernel": Work(rows * config.vocab_size * number),
    }
    untold = [made[name] for name in ("qkv", "o", "gate_up", "down", "lm_head")]
    made[_UNTOLD] = Work(sum(one.bytes for one in untold), sum(one.operations for one in untold), fast)
    return made


def _suits_hopper(config: ModelConfig, info: ReplicaInfo, shape: StepShape, window: int | None) -> bool:
    """As `kernels.cuda` decides it for a pass."""
    # Here, since a CPU can do without Triton.
    from engine.model.decoder import TORCH_DTYPES
    from kernels import ChunkSpan
    from kernels.triton.attention_prefill import plan_expansion, plan_tiles, suits_hopper

    heads = (config.heads, config.kv_heads)
    chunks = [ChunkSpan(0, count, context, 0) for context, count in shape.chunks]
    if info.kv_dtype == FP8:
        tiles = plan_expansion(chunks, *heads, window, EXPANSION_BLOCKS).expanded
    else:
        tiles = plan_tiles(chunks, *heads, window)
    return suits_hopper(tiles, *heads, config.head_dim, TORCH_DTYPES[info.dtype], window)


def _seen(context: int, count: int, window: int | None) -> int:
    """Tokens of the cache, in whole pages, that the last `count` of `context` tokens see."""
    reach = context if window is None else min(context, window - 1 + count)
    return -(-reach // BLOCK_TOKENS) * BLOCK_TOKENS


def _pairs(context: int, count: int, window: int | None) -> float:
    """Pairs of a query and a key that it sees, of `count` tokens after `context`."""
    whole = count * context + count * (count + 1) / 2
    if window is None:
        return whole
    return float(sum(min(window, context + place) for place in range(1, count + 1)))
