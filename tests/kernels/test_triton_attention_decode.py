"""Tests that paged decode attention in Triton equals its reference implementation.

The interpreter (CPU, float32) verifies indexing and masking: block tables, slots, splits, windows, padding
and scales. Only the tests marked `gpu` verify the numerics of bfloat16 and FP8, the memory ordering between
the splits of a sequence, captured graphs with changing lengths, and PDL.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
from kernels.triton import attention_decode as kernel  # noqa: E402
from tests.kernels.closeness import check_as_torch, error, worst_error  # noqa: E402
from tests.kernels.decode_cases import (  # noqa: E402
    BATCHES,
    GPU_LENS,
    KINDS,
    LENS,
    LLAMA,
    OTHERS,
    close,
    fp8_cache,
    make,
    needs_cpu,
    needs_gpu,
    new,
)
from tests.kernels.test_compiling import compiled  # noqa: E402


@needs_cpu
@pytest.mark.parametrize(("batch", "window"), BATCHES)
def test_each_sequence_attends_to_its_pages(batch: str, window: int | None) -> None:
    case = make(LENS[batch], window=window)
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
    """There are more programs than sequences. The test runs twice: with new tokens that are already in the
    cache, and with new tokens that the kernel must write."""
    case, made, config = make(lens), new(make(lens), True), kernel.DecodeConfig(len(lens) + 4, 3)
    for run, expected in ((case.run, case.expected()), (made.run, made.expected_case().expected())):
        out = torch.full((len(lens) + 8, *case.q.shape[1:]), 7.0)
        close(run(out=out[: len(lens)], config=config), expected, 1e-4)
        assert (out[len(lens) :] == 7.0).all()


@needs_cpu
@pytest.mark.parametrize(
    ("lens", "extra"),
    [
        *(([700], extra) for extra in (1, 10)),
        *(([300, 1, 0, 200, 64, 65], extra) for extra in (0, 2, 5, 10)),
        *(([64, 64, 64], extra) for extra in (0, 1)),
    ],
    ids=str,
)
def test_the_result_is_the_same_for_any_split(lens: list[int], extra: int) -> None:
    case = make(lens)
    workspace = kernel.allocate_workspace(16, 4, 2, 16, case.q.device)
    for _ in range(2):  # the second run starts with the counters that the first run left
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
    with pytest.raises(ValueError, match="workspace supports 2 sequences, but the batch has 3"):
        case.run(workspace=small)
    with pytest.raises(ValueError, match=r"items is 2; must be at least 3 .* at most 11"):
        case.run(config=kernel.DecodeConfig(2, 3))
    with pytest.raises(ValueError, match="workspace has kv_heads"):
        case.run(workspace=kernel.allocate_workspace(3, 4, 4, 16, case.q.device))


def test_loads_before_the_wait_cannot_return_stale_data() -> None:
    done = compiled("tests.kernels.decode_compiled")
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    early_pages = {"8 x 8 bf16": False, "8 x 4 bf16": True, "4 x 4 fp8": True}
    assert set(kernels) == set(early_pages)
    for name, events in kernels.items():
        wait = events.index("griddepcontrol.wait")
        # Of the loads before the wait, only those of the angles may use the L1 cache, because angles never
        # change. All others bypass the L1 cache: lengths, slots and, for few sequences, the number and the
        # tiles of the first page.
        early = {event for event in events[:wait] if not event.startswith("ld.global.cg.")}
        assert early == {"ld.global.b32"}, name
        assert events[wait + 1] == "griddepcontrol.launch_dependents", name
        assert "ld.global.b64" in events[wait:] and "cp.async.bulk.tensor" in events[wait:], name
        assert ("ld.global.cg.b64" in events) == early_pages[name]


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
    """The error must be at most twice the error of torch's attention in the same dtype (float16 for FP8
    caches), plus half a rounding error of the result. The bound applies to the whole tensor and to the worst
    sequence and head."""
    case = make(GPU_LENS[lens], *shape, window, dtype=dtype, device="cuda", blocks=700)
    case = fp8_cache(case) if fp8 else case
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
    case = fp8_cache(case) if fp8 else case
    workspace = kernel.allocate_workspace(len(case.lens), *LLAMA, case.q.device)
    first = case.run(workspace=workspace)
    for pdl in (True, False) * 10:
        found = case.run(workspace=workspace, pdl=pdl)
        assert torch.equal(found, first)
        assert (workspace.arrived == 0).all()


@pytest.mark.gpu
@needs_gpu
def test_fp8_at_64k_tokens_stays_within_a_thousandth_of_float32() -> None:
    """The test compares with exact attention over the values in the FP8 cache. Flat weights test the sum of
    65,536 small weights. Peaked weights are tested too. The rounding error of a result is at most half of its
    dtype's eps, or 1.7e-3 by norm."""
    for sharpness in (0.0, 1.0, 30.0):
        case = make([65_536], 32, 8, 128, dtype=torch.bfloat16, device="cuda", blocks=1024)
        case = fp8_cache(replace(case, q=case.q * sharpness))
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
