"""Tests that paged decode attention in Triton equals its reference implementation.

The interpreter (CPU, float32) proves indexing and masking: block tables, slots, splits, windows, padding and
scales; for new tokens, the norm, rotation, cache write and attention. Only a GPU proves the numerics of
bfloat16 and FP8, the memory ordering between the splits of a sequence, that a captured graph follows changing
lengths, and PDL: the tests marked `gpu`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import PAGE_TOKENS, KvPool, Rotation, reference
from kernels.rope import cos_sin_table, default_frequencies

triton = pytest.importorskip("triton")
from kernels.triton import attention_decode as kernel  # noqa: E402
from kernels.triton import fused  # noqa: E402
from tests.kernels.closeness import check_as_torch, check_worst, error, worst_error  # noqa: E402
from tests.kernels.test_compiling import compiled  # noqa: E402

ON_CPU = not torch.cuda.is_available()
needs_cpu = pytest.mark.skipif(not ON_CPU, reason="the interpreter runs only on machines without a GPU")
needs_gpu = pytest.mark.skipif(ON_CPU, reason="no NVIDIA GPU: torch.cuda.is_available() is false")
SCALE = 0.3


@dataclass
class Case:
    q: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor
    window: int | None = None
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None
    scale: float = SCALE

    def run(self, **options: object) -> torch.Tensor:
        options.setdefault("pdl", not ON_CPU)
        if "workspace" not in options:
            _, heads, head_dim = self.q.shape
            kv_heads = self.keys.shape[1]
            options["workspace"] = kernel.allocate_workspace(
                len(self.lens), heads, kv_heads, head_dim, self.q.device
            )
        return kernel.decode(
            self.q,
            self.keys,
            self.values,
            self.table,
            self.rows,
            self.lens,
            self.scale,
            window=self.window,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            **options,  # type: ignore[arg-type]
        )

    def expected(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Return the reference result in `dtype`, with zeros for padding."""
        there = self.lens > 0
        keys, values = self.keys.to(dtype), self.values.to(dtype)
        if self.k_scales is not None and self.v_scales is not None:
            keys, values = keys * self.k_scales.unsqueeze(-1), values * self.v_scales.unsqueeze(-1)
        out = torch.zeros(self.q.shape, dtype=dtype, device=self.q.device)
        if not there.any():
            return out
        tables = self.table.long().clamp(max=len(keys) - 1).index_select(0, self.rows[there])
        out[there] = reference.paged_attention_decode(
            self.q[there].to(dtype),
            keys.to(dtype),
            values.to(dtype),
            tables,
            self.lens[there].long(),
            self.scale,
            self.window,
        )
        return out


def make(
    lens: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    window: int | None = None,
    scaled: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    blocks: int = 24,
    seed: int = 0,
) -> Case:
    """Make sequences over shared random blocks. Reading a block-table entry after the end of a sequence is an
    error."""
    random_ = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_)

    order = random.Random(seed)
    max_num_seqs = len(lens) + 3
    rows = torch.tensor(order.sample(range(max_num_seqs), len(lens)))
    table = torch.full((max_num_seqs, -(-max(lens) // PAGE_TOKENS) + 1), 1 << 28)
    for row, length in zip(rows.tolist(), lens, strict=True):
        for column in range(-(-length // PAGE_TOKENS)):
            table[row, column] = order.randrange(blocks)
    shape = (blocks, kv_heads, PAGE_TOKENS, head_dim)
    case = Case(
        q=draw(len(lens), heads, head_dim).to(dtype),
        keys=draw(*shape).to(dtype),
        values=draw(*shape).to(dtype),
        table=table,
        rows=rows,
        lens=torch.tensor(lens),
        window=window,
        scale=SCALE if ON_CPU else head_dim**-0.5,
    )
    if scaled:
        case.k_scales = torch.rand(shape[:3], generator=random_) + 0.1
        case.v_scales = torch.rand(shape[:3], generator=random_) + 0.1
    names = ("q", "keys", "values", "table", "rows", "lens", "k_scales", "v_scales")
    moved = {name: getattr(case, name) for name in names}
    return replace(case, **{name: each.to(device) for name, each in moved.items() if each is not None})


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert found.shape == expected.shape
    assert (found.double() - expected.double()).abs().max() < tolerance


LENS = {
    "one": [1],
    "one page": [64],
    "three pages": [129],
    "ragged": [5, 63, 127, 128, 129],
    "one is much longer": [1, 2, 700, 4, 5, 6],
    "padding at the end": [70, 65, 0, 0],
    "padding inside": [0, 70, 0, 130, 0],
    "padding only": [0, 0],
}


@needs_cpu
@pytest.mark.parametrize("window", [None, 1, 50, 64, 100])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_each_sequence_attends_to_its_pages(lens: list[int], window: int | None) -> None:
    case = make(lens, window=window)
    close(case.run(), case.expected(), 1e-5)


@needs_cpu
def test_sequences_may_share_blocks_and_rows() -> None:
    case = make([130, 200, 64, 130])
    case.table[case.rows[1], :2] = case.table[case.rows[0], :2]
    case.table[case.rows[2], 0] = case.table[case.rows[0], 0]
    case.rows[3], case.q[3] = case.rows[0], case.q[0]
    found = case.run()
    close(found, case.expected(), 1e-5)
    assert torch.equal(found[3], found[0])


@needs_cpu
@pytest.mark.parametrize("lens", [[0], [0, 70, 0]], ids=str)
def test_padding_gives_zeros_and_writes_nothing_else(lens: list[int]) -> None:
    """There are more programs than sequences. The new tokens either are in the cache or are not."""
    case, made, config = make(lens), new(make(lens), True), kernel.DecodeConfig(len(lens) + 4, 3)
    for run, expected in ((case.run, case.expected()), (made.run, made.expected_case().expected())):
        out = torch.full((len(lens) + 8, *case.q.shape[1:]), 7.0)
        close(run(out=out[: len(lens)], config=config), expected, 1e-4)
        assert (out[len(lens) :] == 7.0).all()


@needs_cpu
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 10])
@pytest.mark.parametrize(
    "lens", [[700], [300, 1, 0, 200, 64, 65], [64, 64, 64]], ids=["one", "mixed", "even"]
)
def test_the_result_is_the_same_for_any_split(lens: list[int], extra: int) -> None:
    case = make(lens)
    workspace = kernel.allocate_workspace(16, 4, 2, 16, case.q.device)
    for _ in range(2):  # the second run depends on the counters that the first run left
        close(
            case.run(config=kernel.DecodeConfig(len(lens) + extra, 3), workspace=workspace),
            case.expected(),
            1e-5,
        )
        assert (workspace.arrived == 0).all()


@needs_cpu
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (6, 2), (7, 1), (20, 1), (8, 1)])
def test_any_group_of_query_heads_is_one_tile(heads: int, kv_heads: int) -> None:
    case = make([200, 64], heads=heads, kv_heads=kv_heads)
    close(case.run(config=kernel.DecodeConfig(4, 3)), case.expected(), 1e-5)


@pytest.mark.parametrize(
    ("group", "head_dim", "pieces"), [(1, 16, 32), (2, 32, 32), (2, 64, 32), (4, 128, 8), (32, 256, 1)]
)
def test_the_combine_loads_a_bounded_number_of_partial_sums(group: int, head_dim: int, pieces: int) -> None:
    assert kernel.splits_at_once(kernel.DecodeConfig(4, 3), group, head_dim) == pieces


@needs_cpu
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
@pytest.mark.parametrize("scaled", [False, True])
def test_scales_belong_to_tokens_and_heads(head_dim: int, scaled: bool) -> None:
    case = make([130, 70], head_dim=head_dim, scaled=scaled, window=100)
    close(case.run(config=kernel.DecodeConfig(3, 3)), case.expected(), 1e-4)


@needs_cpu
def test_indices_may_be_of_either_width_and_queries_strided() -> None:
    case = make([130, 70])
    expected = case.expected()
    case = replace(case, table=case.table.int(), lens=case.lens.int())
    wide = torch.zeros(2, 9, 16)
    wide[:, :4] = case.q
    case = replace(case, q=wide[:, :4])
    close(case.run(), expected, 1e-5)


@needs_cpu
def test_a_workspace_that_is_too_small_is_refused() -> None:
    case = make([130, 70, 5])
    small = kernel.allocate_workspace(2, 4, 2, 16, case.q.device)
    with pytest.raises(ValueError, match="workspace has room for 2 sequences, but the batch has 3"):
        case.run(workspace=small)
    with pytest.raises(ValueError, match=r"items is 2; needs at least 3 .* at most 11"):
        case.run(config=kernel.DecodeConfig(2, 3))
    with pytest.raises(ValueError, match="workspace has kv_heads"):
        case.run(workspace=kernel.allocate_workspace(3, 4, 4, 16, case.q.device))


# ── new tokens, read from the result of the qkv GEMM ─────────────────────────────────────────────


@dataclass
class New:
    """A batch whose new tokens are not in the cache yet. The last block of each sequence is not shared."""

    case: Case
    qkv: torch.Tensor
    rotation: Rotation

    def run(self, **options: object) -> torch.Tensor:
        """Run the kernel, which also writes the new keys and values to the case's cache."""
        heads, head_dim = self.case.q.shape[1:]
        case, kv_heads = self.case, self.case.keys.shape[1]
        workspace = kernel.allocate_workspace(len(case.lens), heads, kv_heads, head_dim, self.qkv.device)
        options = {"workspace": workspace, "pdl": not ON_CPU, "rotation": self.rotation} | options
        return replace(case, q=self.qkv).run(**options)

    def expected_case(self, dtype: torch.dtype | None = None) -> Case:
        """Return the case after the reference implementation has run, in `dtype` or in its own dtypes."""
        case = self.case
        there = case.lens > 0
        dtype = dtype or case.keys.dtype
        numbers = [each.to(dtype, copy=True) for each in (case.keys, case.values)]
        scales = [None if each is None else each.clone() for each in (case.k_scales, case.v_scales)]
        pool = KvPool(*numbers, *scales)
        position = (case.lens - 1).clamp(min=0).long()
        block = case.table.long()[case.rows.long(), position // PAGE_TOKENS]
        queries = torch.zeros_like(case.q)
        queries[there] = reference.rope_cache_write(
            self.qkv[there],
            position[there],
            (block * PAGE_TOKENS + position % PAGE_TOKENS)[there],
            self.rotation,
            pool,
            case.q.shape[1],
        )
        cache = {name: getattr(pool, name) for name in ("keys", "values", "k_scales", "v_scales")}
        return replace(case, q=queries, **cache)


def new(case: Case, norm: bool, seed: int = 9) -> New:
    random_ = torch.Generator().manual_seed(seed)
    (_, heads, size), kv_heads, device = case.q.shape, case.keys.shape[1], case.q.device

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_).to(case.q.dtype).to(device)

    blocks = len(case.keys)
    again = torch.arange(blocks + len(case.lens), device=device) % blocks
    keys, values = case.keys[again], case.values[again]
    for index, (row, length) in enumerate(zip(case.rows.tolist(), case.lens.tolist(), strict=True)):
        if length:
            case.table[row, (length - 1) // PAGE_TOKENS] = blocks + index
    table = cos_sin_table(default_frequencies(size, 10000.0), int(case.lens.max()) + 1).to(device)
    norms = (draw(size), draw(size)) if norm else (None, None)
    qkv = draw(len(case.lens), (heads + 2 * kv_heads) * size)
    return New(replace(case, keys=keys, values=values), qkv, Rotation(table, *norms, 1e-5))


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.view(torch.uint8)


def _check_cache(found: Case, expected_case: Case) -> None:
    """Assert that the cache equals the reference's cache bit for bit, except for the new keys. A few elements
    of new keys may differ by one rounding before or after the rotation, and by one step in e4m3."""
    position = found.lens[found.lens > 0].long() - 1
    block = found.table.long()[found.rows[found.lens > 0].long(), position // PAGE_TOKENS]
    written = torch.zeros(found.keys.shape[:3], dtype=torch.bool, device=found.keys.device)
    written[block, :, position % PAGE_TOKENS] = True
    assert torch.equal(_bytes(found.values), _bytes(expected_case.values)), "values are only copied"
    assert torch.equal(_bytes(found.keys)[~written], _bytes(expected_case.keys)[~written])
    both = (_bytes(each.keys)[written].view(found.keys.dtype).float() for each in (found, expected_case))
    (new, wanted), steps = both, 0.0
    assert (new != wanted).float().sum() <= 0.02 * new.numel() or found.keys.dtype == torch.float32
    if found.k_scales is not None and expected_case.k_scales is not None:
        assert found.v_scales is not None and expected_case.v_scales is not None
        assert torch.equal(found.v_scales, expected_case.v_scales)
        assert torch.equal(found.k_scales[~written], expected_case.k_scales[~written])
        torch.testing.assert_close(found.k_scales, expected_case.k_scales, rtol=1e-2, atol=0)
        new, wanted = (
            new * found.k_scales[written][:, None],
            wanted * expected_case.k_scales[written][:, None],
        )
        steps = 0.14
    largest = wanted.abs().amax(-1, keepdim=True)
    last_places = 3 * max(torch.finfo(found.q.dtype).eps, 1e-5)
    assert ((new - wanted).abs() <= last_places * largest + steps * wanted.abs()).all()


@needs_cpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("window", [None, 1, 64, 100])
@pytest.mark.parametrize("lens", LENS.values(), ids=LENS.keys())
def test_new_tokens_are_rotated_written_and_attended_to(
    lens: list[int], window: int | None, norm: bool
) -> None:
    made = new(make(lens, window=window), norm)
    expected_case = made.expected_case()
    close(made.run(), expected_case.expected(), 1e-4)
    _check_cache(made.case, expected_case)


@needs_cpu
@pytest.mark.parametrize("extra", [0, 1, 5, 10])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(7, 1, 32), (20, 1, 16), (8, 2, 128)])
def test_new_tokens_are_the_same_for_any_split(heads: int, kv_heads: int, size: int, extra: int) -> None:
    made = new(make([300, 1, 0, 193, 64, 65], heads, kv_heads, size), True)
    expected_case = made.expected_case()
    workspace = kernel.allocate_workspace(16, heads, kv_heads, size, made.qkv.device)
    for _ in range(2):
        found = made.run(config=kernel.DecodeConfig(6 + extra, 3), workspace=workspace)
        close(found, expected_case.expected(), 1e-4)
        _check_cache(made.case, expected_case)
        assert (workspace.arrived == 0).all()


@needs_cpu
def test_new_tokens_are_cached_with_a_scale_for_each_token_and_head() -> None:
    made = new(make([130, 70, 0, 193]), True)
    plain = made.expected_case()
    case = made.case
    scales = [torch.rand(case.keys.shape[:3]) + 0.1 for _ in range(2)]
    made.case = replace(
        case,
        keys=case.keys / scales[0].unsqueeze(-1),
        values=case.values / scales[1].unsqueeze(-1),
        k_scales=scales[0],
        v_scales=scales[1],
    )
    close(made.run(), plain.expected(), 1e-4)
    for pool, per_token, whole in zip(
        (made.case.keys, made.case.values), scales, (plain.keys, plain.values), strict=True
    ):
        torch.testing.assert_close(pool * per_token.unsqueeze(-1), whole, rtol=1e-4, atol=1e-5)
        written = (pool.abs().amax(-1) - 448).abs() < 1e-2
        assert written.sum() == 3 * 2, (
            "the largest magnitude is e4m3's maximum, for three tokens and two heads"
        )


@needs_cpu
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("head", [0, 4, 6], ids=["query", "key", "value"])
def test_a_non_finite_new_token_affects_only_its_own_sequence(head: int, number: float) -> None:
    lens, broken = [130, 193, 1, 64, 300], 1
    found = []
    for poisoned in (False, True):
        made = new(make(lens), True)
        if poisoned:
            made.qkv.view(len(lens), -1, 16)[broken, head] = number
        found.append((made.run(config=kernel.DecodeConfig(9, 3)), made.case.keys, made.case.values))
    (clean, *clean_cache), (out, *cache) = found
    others = [index for index in range(len(lens)) if index != broken]
    assert torch.equal(out[others], clean[others])
    assert not out[broken].isfinite().all()
    own = len(cache[0]) - len(lens) + broken
    for pool, clean_pool in zip(cache, clean_cache, strict=True):
        rest = torch.arange(len(pool)) != own
        assert torch.equal(pool[rest], clean_pool[rest])


def _check_changing_lengths(made: New, again: Callable[[], torch.Tensor], roundings: float) -> None:
    """Run `made` by `again` while lengths change between runs, and with them each sequence's last page, which
    is not shared. Results are within the roundings of `check_as_torch`."""
    case = made.case
    own = torch.arange(len(case.lens), device=case.lens.device) + len(case.keys) - len(case.lens)
    longest = int(case.lens.max())
    shared = case.table.remainder(len(case.keys) - len(case.lens))
    for lens in ([longest] * 16, [1, 0, longest - 140, 64] * 4, [longest - 63] + [0] * 15):
        case.lens.copy_(torch.tensor(lens))
        case.table.copy_(shared)
        last = (case.lens - 1).clamp(min=0) // PAGE_TOKENS
        case.table[case.rows, last] = own
        expected_case = made.expected_case()
        out = again()
        assert (out[case.lens == 0] == 0).all()
        check_as_torch(out, expected_case.expected(out.dtype), expected_case.expected(), roundings)
        _check_cache(case, expected_case)


@needs_cpu
def test_new_tokens_are_written_at_the_changed_lengths() -> None:
    made = new(make([320] * 16), False)
    _check_changing_lengths(made, made.run, 500)  # the reference sums and exponentiates in another order


@needs_cpu
def test_a_qkv_of_other_heads_is_refused() -> None:
    made = new(make([130]), True)
    with pytest.raises(ValueError, match=r"q has 112 columns; needs \(heads \+ 2 × 2\) × 16"):
        replace(made, qkv=made.qkv[:, :112]).run()
    with pytest.raises(ValueError, match="only one of q_norm and k_norm"):
        made.run(rotation=replace(made.rotation, k_norm=None))


@needs_cpu
@pytest.mark.parametrize("window", [None, 70])
def test_one_wrong_head_of_one_sequence_is_detected(window: int | None) -> None:
    """Uses float16, which the interpreter rounds as a GPU does."""
    case = make([130, 64, 5, 0, 300, 77], 8, 2, 32, window, dtype=torch.float16)
    made = new(replace(case, scale=32**-0.5), True)
    expected_case = made.expected_case()
    found, torchs, exact = made.run(), expected_case.expected(torch.float16), expected_case.expected()
    check_as_torch(found, torchs, exact, roundings=1)
    check_worst(found, _a_last_place_off(expected_case).expected(torch.float16), exact, roundings=1)
    _check_cache(made.case, expected_case)
    wrong = found.clone()
    wrong[4, 5] = found[4, 6]
    with pytest.raises(AssertionError, match="1 of 48 vectors have errors above"):
        check_worst(wrong, _a_last_place_off(expected_case).expected(torch.float16), exact, roundings=1)
    made.case.keys[-2, 1, 299 % PAGE_TOKENS, 7] += 0.5
    with pytest.raises(AssertionError):
        _check_cache(made.case, expected_case)


# ── compiled for a GPU ───────────────────────────────────────────────────────────────────────────


def test_only_lengths_slots_and_angles_are_read_before_the_wait() -> None:
    done = compiled("tests.kernels.decode_compiled")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 2
    for name, events in kernels.items():
        wait = events.index("griddepcontrol.wait")
        # Angles never change; lengths and slots are loaded past the L1. Page numbers are wider and are loaded
        # after the wait.
        assert set(events[:wait]) == {"ld.global.b32", "ld.global.cg.b32"}, name
        assert events[wait + 1] == "griddepcontrol.launch_dependents", name
        assert "ld.global.b64" in events[wait:] and "cp.async.bulk.tensor" in events[wait:], name


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


def _quantise(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = pool.float().abs().amax(-1) / 448
    return (pool.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def _fp8(case: Case) -> Case:
    keys, k_scales = _quantise(case.keys)
    values, v_scales = _quantise(case.values)
    return replace(case, keys=keys, values=values, k_scales=k_scales, v_scales=v_scales)


GPU_LENS = {
    **LENS,
    "long": [8192],
    "longer": [40_000],
    "many": [640] * 64,
    "mixed": [1, 9000, 64, 65, 0, 128, 3000, 17] * 5,
    "very many": [random.Random(5).randrange(0, 900) for _ in range(1024)],
}


KINDS = {"bf16": (torch.bfloat16, False), "f16": (torch.float16, False), "fp8": (torch.bfloat16, True)}
"""The model's dtype, and whether the cache is FP8."""
LLAMA = (32, 8, 128)
OTHERS = [(8, 4, 64), (28, 4, 128), (8, 8, 256)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("dtype", "fp8"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("shape", "lens", "window"),
    [(LLAMA, lens, None) for lens in GPU_LENS]
    + [(LLAMA, "mixed", 1000)]
    + [(shape, "mixed", None) for shape in OTHERS],
)
def test_the_error_is_at_most_twice_that_of_torch(
    shape: tuple[int, int, int], lens: str, window: int | None, dtype: torch.dtype, fp8: bool
) -> None:
    """The error is at most twice that of torch's attention in the same dtype (float16 for FP8 caches), plus
    half a rounding of the result, over the whole tensor and for the worst sequence and head."""
    case = make(GPU_LENS[lens], *shape, window, dtype=dtype, device="cuda", blocks=700)
    case = _fp8(case) if fp8 else case
    exact = case.expected()
    found = case.run(out=torch.full_like(case.q, float("nan")))
    assert (found[case.lens == 0] == 0).all()
    if int(case.lens.max()) > 0:
        check_as_torch(found, case.expected(torch.float16 if fp8 else dtype).to(dtype), exact)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lens", ["one", "mixed", "longer"])
def test_all_bits_are_the_same_in_every_run_and_without_pdl(lens: str, fp8: bool) -> None:
    case = make(GPU_LENS[lens], *LLAMA, dtype=torch.bfloat16, device="cuda", blocks=700)
    case = _fp8(case) if fp8 else case
    workspace = kernel.allocate_workspace(len(case.lens), *LLAMA, case.q.device)
    first = case.run(workspace=workspace)
    for pdl in (True, False) * 10:
        found = case.run(workspace=workspace, pdl=pdl)
        assert torch.equal(found, first)
        assert (workspace.arrived == 0).all()


@pytest.mark.gpu
@needs_gpu
def test_fp8_at_64k_tokens_stays_within_a_thousandth_of_float32() -> None:
    """Compares with attention over the FP8 cache's values, for flat weights (the sum of 65,536 small
    weights) and peaked weights. The rounding of the result is at most half of its dtype's eps, and 1.7e-3 by
    norm."""
    for sharpness in (0.0, 1.0, 30.0):
        case = make([65_536], 32, 8, 128, dtype=torch.bfloat16, device="cuda", blocks=1024)
        case = _fp8(replace(case, q=case.q * sharpness))
        exact = case.expected(torch.float32).double()
        found = case.run()
        assert error(found, exact) < 3e-3 and worst_error(found, exact) < 5e-3


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_follows_the_lengths() -> None:
    case = make([640] * 16, 32, 8, 128, dtype=torch.bfloat16, device="cuda", blocks=100)
    case = replace(case, table=case.table.clamp(max=99).repeat(1, 4).contiguous())
    workspace = kernel.allocate_workspace(16, 32, 8, 128, case.q.device)
    out = case.run(workspace=workspace).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            case.run(workspace=workspace, out=out)
    for lens in ([640] * 16, [1, 0, 2000, 64] * 4, [2500] + [0] * 15):
        case.lens.copy_(torch.tensor(lens))
        graph.replay()
        check_as_torch(out, case.expected(torch.bfloat16), case.expected())


def _new_on_gpu(
    lens: list[int],
    shape: tuple[int, int, int],
    norm: bool,
    dtype: torch.dtype,
    fp8: bool,
    window: int | None = None,
) -> New:
    made = new(make(lens, *shape, window, dtype=dtype, device="cuda", blocks=700), norm)
    return replace(made, case=_fp8(made.case)) if fp8 else made


NEW_CASES = [
    *((kind, LLAMA, lens, None) for kind in ("bf16", "fp8") for lens in GPU_LENS),
    *(("f16", LLAMA, lens, None) for lens in ("ragged", "mixed", "many")),
    *((kind, LLAMA, "mixed", window) for kind in KINDS for window in (70, 1000)),
    *((kind, shape, "mixed", None) for kind in ("bf16", "fp8") for shape in OTHERS),
]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("kind", "shape", "lens", "window"), NEW_CASES)
def test_the_error_of_new_tokens_is_at_most_twice_that_of_torch(
    kind: str,
    shape: tuple[int, int, int],
    lens: str,
    window: int | None,
    norm: bool,
) -> None:
    """The bound of `test_the_error_is_at_most_twice_that_of_torch`, plus half a rounding more: queries and
    keys differ from the reference by single roundings. In the worst vector such a rounding may be of a large
    element; the bound there is torch's error with queries that are off by one rounding."""
    dtype, fp8 = KINDS[kind]
    made = _new_on_gpu(GPU_LENS[lens], shape, norm, dtype, fp8, window)
    expected_case = made.expected_case()
    found = made.run(out=torch.full_like(expected_case.q, float("nan")))
    assert (found[made.case.lens == 0] == 0).all()
    if int(made.case.lens.max()) > 0:
        exact, computed = expected_case.expected(), torch.float16 if fp8 else dtype
        torchs = expected_case.expected(computed).to(dtype)
        assert error(found, exact) <= 2 * error(torchs, exact) + torch.finfo(dtype).eps / 4
        check_worst(found, _a_last_place_off(expected_case).expected(computed).to(dtype), exact, roundings=1)
    _check_cache(made.case, expected_case)


def _a_last_place_off(case: Case) -> Case:
    """Shift every element of the queries by one unit in the last place."""
    way = torch.arange(case.q.shape[-1], device=case.q.device) * 5 % 3 - 1
    eps = torch.finfo(case.q.dtype).eps
    return replace(case, q=(case.q.double() * (1 + eps * torch.where(way == 0, 1, way))).to(case.q.dtype))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_new_tokens_have_the_same_bits_every_time_and_without_pdl(fp8: bool) -> None:
    """A preceding kernel writes the inputs of the decode kernel late; both are launched with and without
    PDL."""
    made = _new_on_gpu(GPU_LENS["mixed"], LLAMA, True, torch.bfloat16, fp8)
    workspace = kernel.allocate_workspace(len(made.case.lens), *LLAMA, made.qkv.device)
    source = made.qkv.clone()
    first = made.run(workspace=workspace, pdl=False)
    keys = made.case.keys.clone()
    ones = torch.ones(made.qkv.shape[1] // 128 * 128, dtype=torch.bfloat16, device="cuda")
    assert len(ones) == made.qkv.shape[1]
    expected = fused.rms_norm(source, ones, 1e-5, pdl=False)
    made.qkv = expected
    normed = made.run(workspace=workspace, pdl=False)
    for pdl in (True, False) * 10:
        made.qkv = fused.rms_norm(source, ones, 1e-5, pdl=pdl)
        assert torch.equal(made.run(workspace=workspace, pdl=pdl), normed)
    made.qkv = source
    assert torch.equal(made.run(workspace=workspace), first)
    assert torch.equal(made.case.keys.view(torch.uint8), keys.view(torch.uint8))
    assert (workspace.arrived == 0).all()


@pytest.mark.gpu
@needs_gpu
def test_a_captured_graph_writes_new_tokens_at_the_current_lengths() -> None:
    made = new(make([640] * 16, *LLAMA, dtype=torch.bfloat16, device="cuda", blocks=100), False)
    workspace = kernel.allocate_workspace(16, *LLAMA, made.qkv.device)
    out = made.run(workspace=workspace).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run(workspace=workspace, out=out)

    def replayed() -> torch.Tensor:
        graph.replay()
        return out

    _check_changing_lengths(made, replayed, 1)
