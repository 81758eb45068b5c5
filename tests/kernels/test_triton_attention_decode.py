"""Paged decode attention in Triton equals its twin.

The interpreter (CPU, float32) proves indexing and masking: block tables, rows, shares and pieces, windows,
padding, scales. Only a GPU proves the numerics of bfloat16 and FP8, the order of memory between the pieces of
a sequence, that a captured graph follows lengths that change, and PDL: the tests marked `gpu`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch

from kernels import PAGE_TOKENS, reference

triton = pytest.importorskip("triton")
from kernels.triton import attention_decode as kernel  # noqa: E402

ON_CPU = not torch.cuda.is_available()
needs_cpu = pytest.mark.skipif(not ON_CPU, reason="the interpreter runs where there is no GPU")
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
        _, heads, head_dim = self.q.shape
        kv_heads = self.keys.shape[1]
        options.setdefault("pdl", not ON_CPU)
        if "workspace" not in options:
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
        """By the twin, in `dtype`; zeros where there is no token."""
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
    """Sequences over shared random blocks; what the table holds past a sequence's end would be a fault."""
    random_ = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random_)

    order = random.Random(seed)
    max_rows = len(lens) + 3
    rows = torch.tensor(order.sample(range(max_rows), len(lens)))
    table = torch.full((max_rows, -(-max(lens) // PAGE_TOKENS) + 1), 1 << 28)
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
@pytest.mark.parametrize("extra", [0, 1, 2, 5, 10])
@pytest.mark.parametrize(
    "lens", [[700], [300, 1, 0, 200, 64, 65], [64, 64, 64]], ids=["one", "mixed", "even"]
)
def test_the_result_is_the_same_however_the_work_is_cut(lens: list[int], extra: int) -> None:
    case = make(lens)
    workspace = kernel.allocate_workspace(16, 4, 2, 16, case.q.device)
    for _ in range(2):  # the second run finds the counters as the first left them
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
    with pytest.raises(ValueError, match="workspace is for 2 sequences, the batch has 3"):
        case.run(workspace=small)
    with pytest.raises(ValueError, match="items is 2, not between the 3 sequences and the workspace's 11"):
        case.run(config=kernel.DecodeConfig(2, 3))
    with pytest.raises(ValueError, match="workspace is for kv_heads"):
        case.run(workspace=kernel.allocate_workspace(3, 4, 4, 16, case.q.device))


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


def _quantise(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = pool.float().abs().amax(-1) / 448
    return (pool.float() / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def _fp8(case: Case) -> Case:
    keys, k_scales = _quantise(case.keys)
    values, v_scales = _quantise(case.values)
    return replace(case, keys=keys, values=values, k_scales=k_scales, v_scales=v_scales)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


GPU_LENS = {
    **LENS,
    "long": [8192],
    "longer": [40_000],
    "many": [640] * 64,
    "mixed": [1, 9000, 64, 65, 0, 128, 3000, 17] * 5,
    "very many": [random.Random(5).randrange(0, 900) for _ in range(1024)],
}


LLAMA = (32, 8, 128)
OTHERS = [(8, 4, 64), (28, 4, 128), (8, 8, 256)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.bfloat16, False), (torch.float16, False), (torch.bfloat16, True)],
    ids=["bf16", "f16", "fp8"],
)
@pytest.mark.parametrize(
    ("shape", "lens", "window"),
    [(LLAMA, lens, None) for lens in GPU_LENS]
    + [(LLAMA, "mixed", 1000)]
    + [(shape, "mixed", None) for shape in OTHERS],
)
def test_the_error_is_that_of_torch(
    shape: tuple[int, int, int], lens: str, window: int | None, dtype: torch.dtype, fp8: bool
) -> None:
    """At most twice that of torch's attention in the same dtype (float16 for FP8 caches), plus half a
    rounding of the result."""
    case = make(GPU_LENS[lens], *shape, window, dtype=dtype, device="cuda", blocks=700)
    case = _fp8(case) if fp8 else case
    exact = case.expected()
    found = case.run(out=torch.full_like(case.q, float("nan")))
    assert (found[case.lens == 0] == 0).all()
    if int(case.lens.max()) > 0:
        torchs = case.expected(torch.float16 if fp8 else dtype).to(dtype)
        assert _error(found, exact) <= 2 * _error(torchs, exact) + 1e-3


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lens", ["one", "mixed", "longer"])
def test_the_bits_are_the_same_every_time_and_without_pdl(lens: str, fp8: bool) -> None:
    case = make(GPU_LENS[lens], *LLAMA, dtype=torch.bfloat16, device="cuda", blocks=700)
    case = _fp8(case) if fp8 else case
    workspace = kernel.allocate_workspace(len(case.lens), *LLAMA, case.q.device)
    first = case.run(workspace=workspace)
    multiprocessors = torch.cuda.get_device_properties(case.q.device).multi_processor_count
    config = kernel.config_for(len(case.lens), LLAMA[1], LLAMA[2], case.keys.element_size(), multiprocessors)
    for pdl, early in ((True, False), (True, True), (False, False)) * 10:
        found = case.run(workspace=workspace, pdl=pdl, config=replace(config, early=early))
        assert torch.equal(found, first)
        assert (workspace.arrived == 0).all()


@pytest.mark.gpu
@needs_gpu
def test_fp8_at_64k_tokens_stays_within_a_thousandth_of_float32() -> None:
    """Of what the FP8 cache holds: flat weights (the sum of 65,536 small ones) and peaked ones."""
    for sharpness in (0.0, 1.0, 30.0):
        case = make([65_536], 32, 8, 128, dtype=torch.bfloat16, device="cuda", blocks=1024)
        case = _fp8(replace(case, q=case.q * sharpness))
        exact = case.expected(torch.float32).double()
        assert _error(case.run(), exact) < 3e-3


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
        assert _error(out, case.expected()) < 5e-3
