"""Tests that Hopper's prefill attention equals its reference implementation, like
`test_triton_attention_prefill` for the other kernel.

The Gluon interpreter (CPU) verifies indexing and masking in the actual dtypes, and the order of copies,
barriers and products: no buffer is read before it is full, no buffer is overwritten before it has been read,
and nothing deadlocks. Compiling the kernel for Hopper shows that softmax and products overlap; this works on
any machine. Only the tests marked `gpu`, on a Hopper GPU, verify the compiler's output (layouts and register
lifetimes during products), the sums of the tensor cores, and PDL.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import PAGE_TOKENS, AttentionInput, ChunkSpan, KvPool, Rotation, select_backend
from tests.kernels.closeness import check_as_torch, error, worst_error
from tests.kernels.defects import ROOT, Defect
from tests.kernels.test_compiling import compiled

quantise = pytest.importorskip("tests.kernels.decode_cases", exc_type=ImportError).quantise

cases = pytest.importorskip("tests.kernels.test_triton_attention_prefill", exc_type=ImportError)
CudaOps = pytest.importorskip("kernels.cuda", exc_type=ImportError).CudaOps
GpuModel = pytest.importorskip("kernels.compiling", exc_type=ImportError).GpuModel
hopper = pytest.importorskip("kernels.triton.attention_prefill_hopper", exc_type=ImportError)
gluon = pytest.importorskip("tests.kernels.gluon_interpreter", exc_type=ImportError)
Case, plan_tiles, suits_hopper = cases.Case, cases.kernel.plan_tiles, cases.kernel.suits_hopper

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper GPU")
DEVICE = "cuda" if ON_HOPPER else "cpu"
MULTIPROCESSORS = torch.cuda.get_device_properties(0).multi_processor_count if ON_HOPPER else 3
"""Number of programs. In the interpreter, it is small, so that each program has several tiles."""

CHUNKS = {
    **cases.GPU_CHUNKS,
    "across blocks of keys": [(100, 300), (500, 200), (37, 91)],
    "two blocks of keys": [(0, 128), (0, 129), (1, 127), (127, 1), (128, 1), (64, 64)],
    "many of one token": [(300 + 7 * i, 1) for i in range(40)],
    "more than there are multiprocessors": [(50 * i, 70 + i) for i in range(60)],
}
SMALL = ["one token", "a page", "a cached prefix", "several chunks"]
SMALL += ["across blocks of keys", "two blocks of keys"]
GROUPS = [(8, 8), (16, 8), (8, 1), (16, 1), (32, 1), (64, 1)]
"""Numbers of heads and of KV heads to test in addition to (32, 8)."""
BF16, F16 = torch.bfloat16, torch.float16


def make(chunks: str, heads: int = 32, kv_heads: int = 8, dtype: torch.dtype = BF16) -> Case:
    """Make a case in which every block that must not be read contains NaN. In the block table, the blocks of
    each sequence are followed by one of these blocks."""
    case = cases.make(CHUNKS[chunks], heads, kv_heads, 128, dtype=dtype, device=DEVICE, blocks=90)
    last = len(case.keys)
    unread = torch.ones(last + 1, dtype=torch.bool, device=DEVICE)
    for chunk in case.chunks:
        pages = -(-chunk.end // PAGE_TOKENS)
        unread[case.table[chunk.slot, :pages]] = False
        case.table[chunk.slot, pages:] = last
    case.keys, case.values = (torch.cat((pool, pool[:1])) for pool in (case.keys, case.values))
    case.keys[unread] = case.values[unread] = float("nan")
    return case


def paged(case: Case, pdl: bool = True, table: torch.Tensor | None = None) -> torch.Tensor:
    """Run the kernel on the paged cache. The result is zero for tokens outside all chunks, as in
    `Case.expected`."""
    return _prefill(case, case.keys, case.values, case.table if table is None else table, case.chunks, pdl)


def expanded(case: Case, pdl: bool = True, programs: int | None = None) -> torch.Tensor:
    """Run the kernel on a scratch pool that contains the blocks of all chunks, one chunk after another,
    followed by NaN. If `programs` is None, launch one program per multiprocessor."""
    rows, chunks, used = [], [], 0
    for chunk in case.chunks:
        pages = -(-chunk.end // PAGE_TOKENS)
        rows.append(case.table[chunk.slot, :pages])
        chunks.append(ChunkSpan(chunk.first, chunk.count, chunk.context, used))
        used += pages
    keys, values = (
        torch.full((used + 3, *pool.shape[1:]), float("nan"), dtype=pool.dtype, device=DEVICE)
        for pool in (case.keys, case.values)
    )
    keys[:used], values[:used] = case.keys[torch.cat(rows)], case.values[torch.cat(rows)]
    return _prefill(case, keys, values, None, chunks, pdl, programs)


def _prefill(
    case: Case,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor | None,
    chunks: list[ChunkSpan],
    pdl: bool,
    programs: int | None = None,
) -> torch.Tensor:
    tiles = torch.from_numpy(plan_tiles(chunks, case.q.shape[1], keys.shape[1])).to(DEVICE)
    read, out = (keys, values, table, tiles), torch.zeros_like(case.q)
    return hopper.prefill(case.q, *read, case.scale, out, programs or MULTIPROCESSORS, pdl)


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────


def suited(chunks: list[tuple[int, int]], **changes: Any) -> bool:
    """Return whether the Hopper kernel supports the chunks, given as (context, count), in layers with the
    shape of Llama-3.1-8B."""
    shape = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": BF16, "window": None} | changes
    spans = [ChunkSpan(0, count, context, row) for row, (context, count) in enumerate(chunks)]
    return suits_hopper(plan_tiles(spans, shape["heads"], shape["kv_heads"]), **shape)


def test_tiles_with_many_keys_use_the_hopper_kernel() -> None:
    for chunks in ([(0, 8192)], [(0, 2048)] * 2, [(4096, 64)], [(1024, 1)], [(0, 4096), (0, 1000)]):
        assert suited(chunks)
    for chunks in ([], [(0, 1024)] * 4, [(0, 512)] * 16, [(1023, 1)], [(0, 4096)] + [(0, 64)] * 1000):
        assert not suited(chunks)


@pytest.mark.parametrize(
    ("changes", "served"),
    [({"dtype": F16}, True), ({"dtype": torch.float32}, False), ({"window": 4096}, False)]
    + [({"head_dim": head_dim}, False) for head_dim in (64, 256)]
    + [({"heads": heads, "kv_heads": 1}, True) for heads in (1, 2, 4, 8, 16, 32, 64)]
    + [({"heads": heads, "kv_heads": 1}, False) for heads in (3, 7, 12, 128)],
    ids=str,
)
def test_the_hopper_kernel_serves_shapes_that_fit_its_tiles(changes: dict[str, Any], served: bool) -> None:
    assert suited([(0, 8192)], **changes) == served


@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_only_hopper_gpus_use_the_hopper_kernel_in_serving_and_in_builds(
    capability: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: divmod(capability, 10))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "any")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    ops: Any = select_backend("cuda", BF16)
    assert ops._hopper_multiprocessors == (78 if capability == 90 else 0)
    gpu = GpuModel.of("any", capability)
    assert (gpu.hopper, gpu.pdl) == (ops._hopper_multiprocessors > 0, ops.pdl)


@pytest.mark.parametrize(
    ("multiprocessors", "scaled", "blocks", "count", "hopper", "lists"),
    [
        (132, False, 0, 4096, True, "direct"),
        (132, False, 0, 512, False, "direct"),
        (132, True, 64, 4096, True, "expanded"),
        (132, True, 63, 4096, False, "direct"),
        (132, True, 0, 4096, False, "direct"),
        (0, False, 0, 4096, False, "direct"),
        (0, True, 64, 4096, False, "expanded"),
    ],
)
def test_a_pass_on_hopper_without_fp8_uses_the_hopper_kernel(
    multiprocessors: int, scaled: bool, blocks: int, count: int, hopper: bool, lists: str
) -> None:
    q, pool = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((count, 32, 128), (9, 8, 64, 128)))
    no_slots = torch.empty(0, dtype=torch.int64)
    seen = AttentionInput(torch.empty(1, 64), no_slots, no_slots, 0, [ChunkSpan(0, count, 0, 0)])
    ops = CudaOps(blocks, pdl=True, hopper_multiprocessors=multiprocessors)
    plan = ops._plan_chunks(q, pool, seen, None, scaled)
    assert plan.hopper == hopper
    assert (plan.expanded is not None, plan.direct is not None) == (lists == "expanded", lists == "direct")


def test_captured_passes_use_the_other_kernel() -> None:
    no_slots, tiles = torch.empty(0, dtype=torch.int64), torch.zeros(9, 4, dtype=torch.int32)
    captured = AttentionInput(torch.empty(1, 64), no_slots, no_slots, 0, [], {None: tiles})
    plan = CudaOps(pdl=True, hopper_multiprocessors=132).plan_attention(captured)
    assert plan.chunks[None].direct is tiles and not plan.chunks[None].hopper


@pytest.fixture(scope="module")
def built() -> dict[str, dict[str, Any]]:
    """Return the output of `prefill_hopper_compiled` for each variant, by name."""
    done = compiled("tests.kernels.prefill_hopper_compiled")
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    assert found
    return found


def test_softmax_weights_overlap_with_value_products_without_spills(
    built: dict[str, dict[str, Any]],
) -> None:
    """Checks the instructions of each warpgroup's loop."""
    for name, kernel in built.items():
        events = kernel["events"]
        assert "spill" not in events, name
        loops = [place for place, event in enumerate(events) if event == "wait for all but the last"]
        assert len(loops) == 2, name
        for place in loops:
            assert events[place - 16 : place] == ["product"] * 16, name
            after = events[place + 1 : events.index("wait for all", place)]
            # Each thread computes 64 softmax weights and two rescaling factors.
            assert after == ["weight"] * (64 + 2), name
        assert kernel["shared"] <= 227 << 10, name


def test_tritons_dispatch_to_warps_has_no_race(
    built: dict[str, dict[str, Any]],
) -> None:
    """In Triton's compiled dispatch of warp_specialize, writes follow 0, 3, 6, … barriers of all threads, and
    reads follow 1, 4, 7, … barriers. Threads do not access shared memory anywhere else. `scripts/sanitize`
    may therefore suppress racecheck's report about the dispatch."""
    for name, kernel in built.items():
        assert set(kernel["dispatch"]) == {"^w", "wbbbw", "wb$", "^br", "rbbbr", "r$"}, name


# ── in the interpreter ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the kernel with its interpreter. The seed determines the order of its partitions."""
    own = hopper._prefill_hopper

    def patch(seed: int, stages: int = 2, kernel: Any = own) -> None:
        monkeypatch.setattr(hopper, "_prefill_hopper", gluon.Interpreted(kernel, seed))
        monkeypatch.setattr(hopper, "_STAGES", stages)

    return patch


@cases.needs_cpu
@pytest.mark.parametrize(
    ("chunks", "heads", "kv_heads", "dtype", "stages"),
    [(chunks, 4, 2, "bfloat16", 2) for chunks in SMALL]
    + [("a cached prefix", heads, 1, "bfloat16", 2) for heads in (1, 16)]
    + [("over a border", 64, 1, "bfloat16", 2)]
    + [("several chunks", 2, 1, "float16", 2), ("across blocks of keys", 2, 1, "bfloat16", 3)],
)
def test_the_error_is_at_most_twice_that_of_torch_in_the_interpreter(
    chunks: str, heads: int, kv_heads: int, dtype: str, stages: int, interpreted: Callable[..., None]
) -> None:
    case = make(chunks, heads, kv_heads, getattr(torch, dtype))
    exact, torchs = case.expected(), case.expected(case.q.dtype)
    for seed, way in enumerate((paged, expanded)):
        interpreted(seed, stages)
        check_as_torch(way(case), torchs, exact)


@cases.needs_cpu
def test_the_order_of_partitions_changes_no_bit(interpreted: Callable[..., None]) -> None:
    case, results = make("several chunks", 2, 1), []
    for seed in range(3):
        interpreted(seed)
        results.append(paged(case, pdl=seed % 2 == 0))
    assert all(torch.equal(each, results[0]) for each in results)


@cases.needs_cpu
def test_a_block_table_may_be_narrow_and_queries_strided_in_the_interpreter(
    interpreted: Callable[..., None],
) -> None:
    case = make("a cached prefix", 4, 2)
    interpreted(0)
    first = paged(case)
    wide = torch.full((len(case.q), 6, 128), float("nan"), dtype=BF16)
    wide[:, :4] = case.q
    assert torch.equal(paged(replace(case, q=wide[:, :4]), table=case.table.int()), first)


@cases.needs_cpu
def test_one_stage_deadlocks(interpreted: Callable[..., None]) -> None:
    interpreted(0, stages=1)
    with pytest.raises(gluon.Fault, match=r"_compute\) waits for .* k_full.* waits for .* v_empty"):
        paged(make("across blocks of keys", 2, 1))


ORDERS = {
    "keys are not waited for": (
        "        mbarrier.wait(k_full.index(stage), phase)\n",
        "",
        "reads k_smem before waiting|overwrites k_smem",
    ),
    "the next keys are not waited for": (
        "ahead = back + 1 < blocks",
        "ahead = back + 2 < blocks",
        "reads k_smem before waiting|overwrites k_smem",
    ),
    "keys that are never loaded are waited for": (
        "ahead = back + 1 < blocks",
        "ahead = back + 0 < blocks",
        r"waits for parity . of k_full",
    ),
    "values are not waited for": (
        "            mbarrier.wait(v_full.index(stage), phase)\n            of_values",
        "            of_values",
        "reads v_smem before waiting|overwrites v_smem",
    ),
    "queries are not waited for": (
        "        mbarrier.wait(q_full, turn & 1)\n",
        "",
        "reads q_smem before waiting|overwrites q_smem",
    ),
    "a stage is filled before it is free": (
        "    mbarrier.wait(empty, phase ^ 1)\n",
        "",
        "overwrites k_smem|overwrites v_smem",
    ),
    "a stage is waited for in the wrong phase": (
        "mbarrier.wait(empty, phase ^ 1)",
        "mbarrier.wait(empty, phase)",
        r"partition 2 \(_fetch\) waits for parity 0 of k_empty\[0\], whose phase 0 lacks 2 of 2",
    ),
    "queries are replaced before they are free": (
        "        mbarrier.wait(q_empty, (turn & 1) ^ 1)\n",
        "",
        "overwrites q_smem|arrivals exceed the count of q_full",
    ),
    "one warpgroup releases the queries for both": (
        "mbarrier.init(q_empty, count=2)",
        "mbarrier.init(q_empty, count=1)",
        "overwrites q_smem|exceed the count of q_empty|waits for parity . of q_",
    ),
    "keys are never released": (
        "            mbarrier.arrive(k_empty.index(k_stage), count=1)\n",
        "",
        r"waits for parity . of k_empty",
    ),
    "values are released by one warp alone": (
        "p = warpgroup_mma_wait(0, deps=[of_values, following, p])\n            tl.debug_barrier()\n",
        "p = warpgroup_mma_wait(0, deps=[of_values, following, p])\n",
        "overwrites v_smem, which a product may still read",
    ),
    "scores are used before their product has ended": (
        "warpgroup_mma_wait(1, deps=[of_keys])",
        "warpgroup_mma_wait(2, deps=[of_keys])",
        "uses a product before waiting for it",
    ),
    "half the bytes are expected": (
        "mbarrier.expect(ready, 128 * 128 * 2)",
        "mbarrier.expect(ready, 128 * 64 * 2)",
        "copies more bytes to k_smem than",
    ),
    "a step too few is counted": (
        "        step += 1\n        count = ",
        "        count = ",
        "reads . before|overwrites ._smem|waits for parity|without waiting for",
    ),
    "programs compute tiles of other programs": (
        "return turn * programs + gl.where",
        "return turn * (programs - 1) + gl.where",
        "is stored twice",
    ),
}


@cases.needs_cpu
@pytest.mark.parametrize("order", ORDERS)
def test_a_wrong_order_is_detected(order: str, tmp_path: Path, interpreted: Callable[..., None]) -> None:
    """On a GPU, a defect might remain unnoticed for years. `test_gluon_interpreter` checks that such faults
    are found whatever the order in which the partitions run."""
    right, wrong, fault = ORDERS[order]
    defect = Defect(order, "attention_prefill_hopper.py", right, wrong, "")
    interpreted(0, kernel=_seeded(defect, tmp_path)._prefill_hopper)
    with pytest.raises(gluon.Fault, match=fault):
        paged(make("across blocks of keys", 2, 1))


def _seeded(defect: Defect, tree: Path) -> ModuleType:
    """Return the kernel's module with the defect seeded into it."""
    path = tree / defect.source
    path.parent.mkdir(parents=True)
    path.write_text((ROOT / defect.source).read_text())
    defect.apply(tree)
    spec = importlib.util.spec_from_file_location("seeded", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("chunks", "heads", "kv_heads", "dtype"),
    [(chunks, 32, 8, dtype) for chunks in CHUNKS for dtype in ("bfloat16", "float16")]
    + [("mixed", *group, "bfloat16") for group in GROUPS],
)
def test_the_error_is_at_most_twice_that_of_torch(chunks: str, heads: int, kv_heads: int, dtype: str) -> None:
    """The error must be at most twice the error of torch's attention in the same dtype, plus half a rounding
    error of the result. The bound applies to the whole tensor and to the worst token and head.

    float16 is tested with only one group size, because each kernel takes seconds to compile and the dtype
    does not interact with the group size.
    """
    case = make(chunks, heads, kv_heads, getattr(torch, dtype))
    exact, torchs = case.expected(), case.expected(case.q.dtype)
    check_as_torch(paged(case), torchs, exact)
    check_as_torch(expanded(case), torchs, exact)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("chunks", ["mixed", "more than there are multiprocessors"])
@pytest.mark.parametrize("way", [paged, expanded])
def test_all_bits_are_the_same_in_every_run_and_without_pdl(
    way: Callable[..., torch.Tensor], chunks: str
) -> None:
    case = make(chunks)
    first = way(case)
    for pdl in (True, False) * 5:
        assert torch.equal(way(case, pdl), first)


@on_hopper
@pytest.mark.gpu
def test_a_block_table_may_be_narrow_and_queries_strided() -> None:
    case = make("mixed")
    first = paged(case)
    assert torch.equal(paged(case, table=case.table.int()), first)
    wide = torch.full((len(case.q), 40, 128), float("nan"), dtype=BF16, device="cuda")
    wide[:, :32] = case.q
    assert torch.equal(paged(replace(case, q=wide[:, :32])), first)


@on_hopper
@pytest.mark.gpu
def test_chunks_may_share_blocks() -> None:
    case = make("several chunks")
    _, second, _, fourth = (chunk.slot for chunk in case.chunks)
    case.table[fourth, :3] = case.table[second, :3]
    check_as_torch(paged(case), case.expected(BF16), case.expected())


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_pass_with_a_long_prompt_matches_the_other_kernel(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run `CudaOps` on a pass with decodes and a chunk. Without the decodes, the chunk would use the other
    kernel. Both kernels round weights and results to bfloat16, and each rounding adds an error of 1.7e-3 by
    norm."""
    launches = []
    launch = hopper.prefill

    def noted(*arguments: Any) -> torch.Tensor:
        launches.append(arguments)
        return launch(*arguments)

    monkeypatch.setattr(hopper, "prefill", noted)
    ways = [CudaOps(64, pdl=True, hopper_multiprocessors=many) for many in (MULTIPROCESSORS, 0)]
    (found, cache), (expected, expected_cache) = (_attend(ops, fp8) for ops in ways)
    assert len(launches) == 1
    assert all(torch.equal(*pools) for pools in zip(cache.tensors(), expected_cache.tensors(), strict=True))
    assert error(found, expected.double()) < 6e-3 and worst_error(found, expected.double()) < 2e-2


def _attend(ops: Any, fp8: bool) -> tuple[torch.Tensor, KvPool]:
    """Return the result and the cache of a pass with three decodes, 2,200 tokens of one prompt, and 70 tokens
    of another prompt. The second prompt has a context of 300 tokens."""
    heads, kv_heads, columns = 32, 8, 35
    random_ = torch.Generator("cuda").manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=random_)

    table = torch.randperm(5 * columns, device="cuda", generator=random_).view(5, columns)
    pools = [draw(5 * columns, kv_heads, PAGE_TOKENS, 128).to(BF16) for _ in range(2)]
    pool = KvPool(*pools)
    if fp8:
        (keys, k_scales), (values, v_scales) = (quantise(one) for one in pools)
        pool = KvPool(keys, values, k_scales, v_scales)
    chunks = [ChunkSpan(3, 2200, 0, 3), ChunkSpan(2203, 70, 300, 4)]
    lens = torch.tensor([5, 64, 700], device="cuda")
    asked = [(row, int(length) - 1) for row, length in enumerate(lens)]
    asked += [(chunk.slot, chunk.context + place) for chunk in chunks for place in range(chunk.count)]
    rows, positions = torch.tensor(asked, device="cuda").T.contiguous().unbind()
    slots = table[rows, positions // PAGE_TOKENS] * PAGE_TOKENS + positions % PAGE_TOKENS
    angle = draw(columns * PAGE_TOKENS, 64)
    rotation = Rotation(torch.cat((angle.cos(), angle.sin()), dim=1))
    qkv = draw(len(asked), (heads + 2 * kv_heads) * 128).to(BF16)
    plan = ops.plan_attention(AttentionInput(table, rows[:3], lens, columns, chunks))
    return ops.attend(qkv, positions, slots, rotation, pool, heads, plan, 128**-0.5, None), pool
