"""Tests of the all-reduce with a quantised norm. The simulated ranks receive words late and share arenas with
other collectives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.triton import all_reduce_norm, peer_arena
from tests.kernels.peer_machine import AnyCall, Call, Fault, NormCall, PeerMachine
from tests.kernels.test_triton_all_reduce import WORLDS, calls_of, wanted

EPS = 1e-2


def norm_call(seed: int, world: int, most_rows: int) -> NormCall:
    chosen, numbers = random.Random(seed), np.random.default_rng(seed)
    rows, hidden = chosen.randint(1, most_rows), chosen.choice((256, 768, 1024, 8192))

    def normal(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape).astype(np.float16)

    x, residual = normal(world, rows, hidden), np.repeat(normal(1, rows, hidden), world, axis=0)
    x[:, :, 5], x[:, :, 4] = -0.0, 0.0
    if seed % 3 == 0:
        x[:, 0], residual[:, 0] = -0.0, 0.0  # the scale of a row of zeros is 0
    return NormCall(x, residual, normal(hidden), EPS)


def check(machine: PeerMachine, calls: list[AnyCall]) -> None:
    before = {id(call): call.residual[0].copy() for call in calls if isinstance(call, Call | NormCall)}
    machine.run(calls)
    for call in calls:
        if isinstance(call, Call):
            for rank in range(machine.world):
                np.testing.assert_array_equal(call.residual[rank], wanted(call, before[id(call)])[0])
        elif isinstance(call, NormCall):
            _check_norm(call, before[id(call)])
    assert (machine.arenas == peer_arena.EMPTY_WORD).all()


def _check_norm(call: NormCall, before: np.ndarray) -> None:
    total = np.zeros(before.shape, np.float32)
    for part in call.x:
        total += part.astype(np.float32)
    residual = (total + before.astype(np.float32)).astype(np.float16)
    exact = residual.astype(np.float64)
    normed = exact / np.sqrt(np.square(exact).mean(1, keepdims=True) + EPS) * call.gain.astype(np.float64)
    for rank in range(call.world):
        np.testing.assert_array_equal(call.residual[rank], residual)
        found, scales = call.values[rank].astype(np.float64), call.scales[rank].astype(np.float64)
        # The kernel rounds to float16 before it quantises.
        np.testing.assert_allclose(found * scales[:, None], normed, rtol=6e-4, atol=1e-6)
        empty = (normed == 0).all(1)
        np.testing.assert_allclose(np.abs(found).max(1), np.where(empty, 0, 448), rtol=1e-6)
        for results in (call.values, call.scales):
            np.testing.assert_array_equal(results[rank], results[0])


def mixed_calls(seed: int, world: int, count: int, most_rows: int) -> list[AnyCall]:
    chosen, sums = random.Random(seed), iter(calls_of(seed, world, count, most_rows))
    return [
        norm_call(100 * seed + number, world, most_rows) if chosen.random() < 0.6 else next(sums)
        for number in range(count)
    ]


@pytest.mark.parametrize(("world", "seed"), WORLDS)
def test_all_ranks_get_the_quantised_norm_of_the_sum_in_any_order_of_delivery(world: int, seed: int) -> None:
    check(PeerMachine(world, 4, 9, seed), mixed_calls(seed, world, 8, most_rows=4))


def test_a_region_is_used_again_many_times() -> None:
    check(PeerMachine(2, 1, 8, seed=1), mixed_calls(5, 2, 80, most_rows=1))


@pytest.mark.parametrize(
    "replacements",
    [
        {"words = payload(gl.load(x + at))": "words = gl.load(x + at)"},
        {"half = (program.to(gl.int64) * 2 + (call & 1))": "half = (program.to(gl.int64) * 2)"},
        {"at = received + part * (BLOCK * 4)": "at = received"},
        {"gl.store(calls + row, call + 1)": ""},
        {"squares / (2 * WORDS)": "squares / WORDS"},
        {"gl.maximum(gl.abs(low), gl.abs(high))": "gl.abs(low)"},
    ],
    ids=["reserved value sent", "one half", "same part", "uncounted", "wrong mean", "half of the maximum"],
)
def test_a_broken_kernel_is_detected(replacements: dict[str, str]) -> None:
    with pytest.raises((Fault, AssertionError)):
        for seed in range(10):
            check(PeerMachine(2, 2, 17, seed, replacements), mixed_calls(seed, 2, 8, most_rows=2))


def test_rows_that_do_not_fit_one_program_are_refused() -> None:
    arena = peer_arena.Arena(0, 2, *[None] * 2, stop_address=0, items=16)  # type: ignore[arg-type]
    assert all_reduce_norm.fits(64, 8192, arena) and all_reduce_norm.fits(1, 5120, arena)
    assert not all_reduce_norm.fits(1, 2880, arena), "the row does not consist of whole blocks"
    assert not all_reduce_norm.fits(1, 32768, arena), "the row exceeds a program's region"
    assert not all_reduce_norm.fits(peer_arena.PROGRAMS + 1, 256, arena)
    assert [all_reduce_norm.block_words(words) for words in (4096, 2560, 1792, 128)] == [2048, 512, 256, 128]
