"""Runs each kernel once or a few times with small odd shapes. `scripts/sanitize` runs this program under
compute-sanitizer.

    python -m tests.kernels.exercise decode prefill

Tensors are exactly as large as needed, and block-table entries after the end of a sequence name nonexistent
blocks. The program only checks that results are finite; other tests check that they are correct. Without a
GPU, the kernels run in the interpreter, in float32, with fewer cases and without features that the
interpreter does not support.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from kernels import ChoiceCount
from kernels.draws import Logits
from kernels.triton import attention_decode, decode_step, experts_many, fused, linear, sampling
from kernels.triton.embedding import embedding_part
from kernels.triton.experts_plans import ExpertsPlan, LayerPlans
from kernels.triton.linear_plans import GemmPlan
from tests.kernels import decode_cases
from tests.kernels import test_triton_attention_prefill as prefill_cases
from tests.kernels import test_triton_attention_prefill_hopper as hopper_cases
from tests.kernels import test_triton_blocks as block_cases
from tests.kernels import test_triton_experts as experts_cases
from tests.kernels import test_triton_experts_route as route_cases
from tests.kernels import test_triton_fused as fused_cases
from tests.kernels import test_triton_linear as linear_cases
from tests.kernels import test_triton_sampling as sampling_cases
from tests.kernels.shipped_plans import Product, shipped_plans

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
E4M3 = torch.float8_e4m3fn
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)


def decode() -> None:
    """Run decode attention on sequences with one split and with several splits, with and without a window,
    with padding, and in FP8."""
    batches = ([1, 64, 65, 0, 130, 700], None), ([300], None), ([0], None), ([200, 127], 100)
    for lens, window in batches if ON_GPU else batches[2:]:
        case = decode_cases.make(lens, 6, 2, 64, window, dtype=DTYPE, device=DEVICE.type)
        config = attention_decode.config_for(len(lens), 2, 3, 64, case.keys.element_size(), 8)
        config = replace(config, items=len(lens) + 3)
        _finite(case.run(config=config))
        made = decode_cases.new(case, norm=window is None)
        _finite(made.run(config=config))
        if ON_GPU:
            made.case = decode_cases.fp8_cache(made.case)
            config = replace(config, stages=5, maxnreg=96)
            _finite(made.case.run(config=config), made.run(config=config))
        _finite(made.run(config=replace(config, early=True)))


def prefill() -> None:
    """Run prefill attention on chunks whose context crosses block boundaries, with and without a window. FP8
    pages are read directly in one case, and expanded first in another."""
    chunks = [(0, 65), (200, 33), (0, 1), (127, 130)]
    for window in (None, 100):
        case = prefill_cases.make(chunks, 6, 2, 64, window, dtype=DTYPE, device=DEVICE.type)
        _finite(case.run(out=torch.zeros_like(case.q)))
        if ON_GPU:
            case = decode_cases.fp8_cache(case)
            _finite(case.run(out=torch.zeros_like(case.q)))
            _finite(case.run_expanded(scratch_blocks=7)[0])


def prefill_hopper() -> None:
    """Run Hopper's prefill attention on more tiles than programs, on chunks whose context crosses boundaries
    of blocks and of groups of 128 keys. Keys and values are read first from pages and then from the scratch
    pool."""
    if not HOPPER:
        return
    for chunks, heads, kv_heads in (("several chunks", 4, 2), ("across blocks of keys", 3, 3)):
        case = hopper_cases.make(chunks, heads, kv_heads, DTYPE)
        _finite(hopper_cases.paged(case), hopper_cases.expanded(case, programs=5))


def fuse() -> None:
    """Run RMSNorm, RoPE with cache writes, and SwiGLU, plain and quantised, at widths that are not multiples
    of a tile."""
    pdl = ON_GPU
    values = E4M3 if ON_GPU else torch.float32
    for tokens, width in ((1, 64), (5, 100), (3, 2880)):
        x = fused_cases.random_tensor(tokens, width, dtype=DTYPE)
        weight = fused_cases.random_tensor(width, seed=2, dtype=DTYPE)
        _finite(fused.rms_norm(x, weight, 1e-5, pdl=pdl))
        _finite(*fused.rms_norm_fp8(x, weight, 1e-5, values=values, pdl=pdl))
        _finite(fused.silu_mul(x, pdl=pdl))
        _finite(*fused.silu_mul_fp8(x, values=values, pdl=pdl))
    for case in fused_cases.ROPE_CASES:
        rope = fused_cases.Rope(*case[:4], DTYPE, case[4])
        _finite(rope.run(fused.rope_cache_write, *rope.pools(DTYPE), pdl=pdl))
        pools = rope.pools(values)
        _finite(rope.run(fused.rope_cache_write, *pools, *rope.scales(), pdl=pdl))


def multiply() -> None:
    """Run GEMMs with few rows using every kernel variant and all fused operations."""
    everything = ("norm", "bias", "residual")
    plans = [(case[0], case[4]) for case in linear_cases.CASES if ON_GPU or case[4].form == "gemv"]
    plans += [(1, GemmPlan("stream", 1, 16, 64, warps=2, stages=2)), (9, replace(linear_cases.DOT, split=2))]
    if HOPPER:
        plans += [(5, GemmPlan("tiles", 8, 64, 64, warps=4, stages=2, split=split)) for split in (1, 3)]
    for tokens, of_two_bytes in plans:
        of_one = replace(of_two_bytes, block_k=128) if of_two_bytes.form == "tiles" else of_two_bytes
        for extras in (everything, ("norm", "bias", "silu")):
            case = linear_cases.Case(tokens, 160, 384, extras, DTYPE)
            if of_two_bytes.form != "stream":
                _finite(linear.linear(case.x, case.weight, **case.options(), plan=of_two_bytes, pdl=ON_GPU))
            if ON_GPU:
                fp8 = linear_cases.Fp8Case(tokens, 160, 384, extras, DTYPE, E4M3)
                weight = (fp8.quantised, fp8.weight_scale)
                _finite(linear.linear_fp8(fp8.x, *weight, **fp8.options(), plan=of_one))
        if of_two_bytes.tiled:
            case = linear_cases.Case(tokens, 160, 384, everything, DTYPE)
            gain = case.weight[:, 0].contiguous()
            half, deferred_norm = case.half_normed(3), linear.allocate_deferred_norm(of_two_bytes, case.out)
            options = case.options_after(replace(half, squares=half.squares.clone()))
            options |= {"next_gain": gain, "deferred_norm": deferred_norm}
            _finite(linear.linear(half.values, case.weight, **options, plan=of_two_bytes, pdl=ON_GPU))
            _finite(deferred_norm.values, deferred_norm.squares)
    values = E4M3 if ON_GPU else torch.float32
    _finite(*linear.quantise(case.x, values=values, pdl=ON_GPU))
    for tokens, shape in ((1, 1), (5, 2), (130, 1), (200, 2)) if ON_GPU else ((5, 2),):
        block_cases.check_linears(tokens, block_cases.SHAPES[shape], DTYPE, values, pdl=ON_GPU)
    if HOPPER:
        for tokens in (1, 17, 64):
            block_cases.check_linears(tokens, block_cases.SHAPES[0], DTYPE, values, pdl=True, hopper=True)


def mix() -> None:
    """Run the routers and all of the experts' kernels, in the model's dtype and in FP8. Sizes are not
    multiples of a tile, and there are several blocks to sort. Some experts are chosen by no token, some by
    every token, and some are on other ranks."""
    values = E4M3 if ON_GPU else None
    for case in route_cases.CASES[: 2 if ON_GPU else 1]:
        made = route_cases.Case(*case, DTYPE)
        for way in ("few", "many"):
            for quantised in {None, values}:
                routed = made.run(way, normalised=True, values=quantised, pdl=ON_GPU)
                _finite(routed.normed, routed.weights)
            count = ChoiceCount(torch.zeros(case[1], dtype=torch.int64, device=DEVICE), made.live)
            made.run(way, normalised=True, count=count, pdl=ON_GPU)
    for *shape, kind in (experts_cases.FEW[0], experts_cases.LATE[2])[: 2 if ON_GPU else 1]:
        for quantised in {None, values}:
            layer = experts_cases.Case(*shape, DTYPE, kind, quantised)
            for plan in (experts_cases.GEMV, experts_cases.DOT):
                layer.check_few(plan, plan, pdl=ON_GPU)
            layer.check_many(experts_cases.GROUPED, experts_cases.GROUPED, programs=3, pdl=ON_GPU)
            for plan in (experts_cases.GEMV, experts_cases.DOT, experts_cases.GROUPED):
                layer.check_ranks(LayerPlans(plan, plan), pdl=ON_GPU)
    if ON_GPU:
        layer = experts_cases.Case(2, 9, 4, 256, 128, DTYPE, "odd", values)
        plans = ExpertsPlan("stream", 1, 16, 64, 4, 1), ExpertsPlan("stream", 1, 16, 64, 4)
        layer.check_few(*plans, pdl=True)
        layer.check_ranks(LayerPlans(*plans), pdl=True)
    for tokens in (1, 17, 70) if ON_GPU else ():
        block_cases.check_experts(tokens, block_cases.LAYERS[0], DTYPE, E4M3, pdl=True)
    several = experts_cases.routed(experts_cases.choices("odd", 50, 500, 3), 500)
    _finite(experts_many.sort(several, 500, (16, 32), first=3, held=400, pdl=ON_GPU).order)


def ship(dtype: torch.dtype) -> None:
    """Run every shipped plan for weights of type `dtype`, with all fused operations. In the interpreter, run
    only one plan of each form, because the interpreter ignores stages and warps."""
    plans = [one for one in shipped_plans() if one.dtype == dtype]
    if not ON_GPU:
        plans = list(
            {one.plan.form: one for one in plans if dtype != E4M3 and one.plan.form != "tiles"}.values()
        )
    for shipped in plans:
        if shipped.plan.form == "tiles" and ON_GPU and not HOPPER:
            continue
        for silu in (False, True):
            made = Product(shipped, shipped.uses[-1][0], shipped.short_k, silu, DTYPE)
            _finite(*made.run(**made.inputs, out=made.case.out, pdl=ON_GPU))


def sample() -> None:
    """Sample with every variant over a vocabulary of two and a half chunks, with and without logits
    processors. Ties in the logits make the kernels' searches long."""
    params = sampling_cases.MIXED if ON_GPU else sampling_cases.MIXED[::3]
    draws = sampling_cases._draws(params)
    for step in (0.0, 0.5) if ON_GPU else (0.5,):
        values = sampling_cases._logits(len(params))
        values = ((values / step).round() * step if step else values).to(DTYPE)
        logits: Logits = sampling_cases._wrap(values)
        _finite(*sampling.greedy(logits))
        _finite(*sampling.plain(logits, draws))
        _finite(*sampling.full(logits, draws))
    some = torch.tensor([0, 3, -1, 5], device=DEVICE)
    counts = torch.ones((2, values.shape[1]), dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([0, -1, -1, 1], device=DEVICE)
    last = values.shape[1] - 1
    places = (torch.tensor([0, 3, -1], device=DEVICE), torch.tensor([last, 0, 0], device=DEVICE))
    bias = (*places, torch.tensor([1.0, 2.0, 3.0], device=DEVICE))
    edited = sampling.edit(logits, draws, some, counts, slots, bias, places)
    index = torch.full((len(params),), -1, device=DEVICE)
    index[[0, 3, 5]] = torch.tensor([0, 1, 3], device=DEVICE)
    _finite(*sampling.full(replace(logits, edited=edited, edited_index=index), draws))


def place() -> None:
    """Run the first and the last kernel of a decode step, with padding."""
    tokens, lengths, blocks = (torch.arange(n, device=DEVICE) for n in (130, 130, 130 * 3))
    which = torch.cat((torch.arange(130, device=DEVICE), torch.full((7,), -1, device=DEVICE)))
    decodes = decode_step.empty_decodes(137, DEVICE)
    decode_step.place(which, tokens, lengths, blocks.view(130, 3), decodes)
    decode_step.advance(which, decodes.token_ids, decodes.positions, tokens, lengths)


def embed() -> None:
    """Look up tokens whose embeddings are on this rank and on other ranks, at widths that are not multiples
    of a tile."""
    token_ids = torch.tensor([0, 9, 10, 19, 20, -1], device=DEVICE)
    for hidden in (64, 1000, 2880):
        weight = torch.ones((10, hidden), dtype=DTYPE, device=DEVICE)
        _finite(embedding_part(token_ids, weight, 10, pdl=ON_GPU))


def exchange() -> None:
    """Run the collectives over peer memory on one GPU, which takes the role of each rank in turn. Before each
    call, write to the rank's arena all words that other ranks would send, so that no call has to wait."""
    if not HOPPER:
        return
    # Import these modules here, because Gluon kernels cannot be interpreted on a CPU.
    from kernels.triton import all_gather, all_reduce, all_reduce_norm
    from kernels.triton.peer_arena import PROGRAMS, Arena, arena_words, stop_words
    from kernels.triton.sum_parts import sum_parts

    stop = stop_words(0, DEVICE)
    for world in (2, 4):
        arenas = [torch.ones(arena_words(world, 2), dtype=torch.int32, device=DEVICE) for _ in range(world)]
        addresses = torch.tensor([arena.data_ptr() for arena in arenas], device=DEVICE)
        for rank in range(world):
            calls = torch.zeros(PROGRAMS, dtype=torch.int32, device=DEVICE)
            arena = Arena(rank, world, addresses, calls, stop_address=stop.data_ptr(), items=2)
            for rows, hidden, two_shot in (
                (1, 256, False),
                (3, 1792, True),
                (700, 1024, False),
                (5, 2048, True),
            ):
                x, residual = (torch.ones((rows, hidden), dtype=DTYPE, device=DEVICE) for _ in range(2))
                squares = torch.empty((all_reduce.squares_parts(hidden), rows), device=DEVICE)
                norm = {"gain": x[0].clone(), "scaled": torch.empty_like(x), "squares": squares}
                for options in ({}, norm):
                    arenas[rank].fill_(1)
                    all_reduce.all_reduce_add(x, residual, arena, two_shot=two_shot, **options)
                    _finite(residual, *list(options.values())[1:])
                arenas[rank].fill_(1)
                all_reduce.all_reduce_add(x, residual, arena, two_shot=two_shot, add=False)
                _finite(residual)
            for rows, hidden in ((1, 256), (5, 1792), (33, 2048)):
                x, residual = (torch.ones((rows, hidden), dtype=DTYPE, device=DEVICE) for _ in range(2))
                arenas[rank].fill_(1)
                _finite(
                    residual, *all_reduce_norm.all_reduce_norm_fp8(x, residual, x[0].clone(), 1e-5, arena)
                )
            for count, width, fence in ((1, 1, True), (370, 37, False), (5000, 5000, False)):
                arenas[rank].fill_(1)
                words = torch.ones(count, dtype=torch.int32, device=DEVICE)
                _finite(all_gather.all_gather(words, width, arena, pdl=not fence, fence=fence))
            for rows in (1, 200):
                arenas[rank].fill_(1)
                values, ids = torch.ones(rows, device=DEVICE), torch.arange(rows, device=DEVICE)
                _finite(all_gather.best_of_ranks(values, ids, arena))
            parts = torch.ones((world, 7, 520), dtype=DTYPE, device=DEVICE)
            own, out = parts[rank, :5].clone(), torch.empty((5, 520), dtype=DTYPE, device=DEVICE)
            sum_parts(parts, own, own, out, rank)
            _finite(out)


GROUPS: dict[str, Callable[[], None]] = {
    "decode": decode,
    "prefill": prefill,
    "prefill_hopper": prefill_hopper,
    "fuse": fuse,
    "multiply": multiply,
    "mix": mix,
    "ship_bf16": partial(ship, torch.bfloat16),
    "ship_fp8": partial(ship, E4M3),
    "sample": sample,
    "place": place,
    "embed": embed,
    "exchange": exchange,
}


def _finite(*results: torch.Tensor) -> None:
    if ON_GPU:
        torch.cuda.synchronize()
    for number, result in enumerate(results):
        wrong = ~result.float().isfinite()
        if wrong.any():
            shape, first = tuple(result.shape), tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"result {number}, {result.dtype} {shape}: {int(wrong.sum())} of {wrong.numel()} are not "
                f"finite, the first at {first}"
            )


def main(names: list[str]) -> int:
    for name in names or GROUPS:
        GROUPS[name]()
    if ON_GPU:
        torch.cuda.synchronize()
    print("ran", *(names or GROUPS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
