"""Tests of the all-reduce's push protocol. The simulated ranks receive words late, run ahead of each other,
and reuse their arenas."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.triton import all_reduce, peer_arena
from tests.kernels.peer_machine import Call, Fault, PeerMachine

WORLDS = [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1), (8, 2)]
"""Numbers of ranks, with the seeds of their calls and of the order of delivery."""


def calls_of(seed: int, world: int, count: int, most_rows: int = 5) -> list[Call]:
    chosen, numbers = random.Random(seed), np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return numbers.standard_normal(shape).astype(np.float16)

    made = []
    for _ in range(count):
        rows, hidden = chosen.randint(1, most_rows), chosen.choice((256, 512, 1024))
        residual = np.repeat(normal(1, rows, hidden), world, axis=0)
        two_shot, add = chosen.random() < 0.5, chosen.random() < 0.8
        made.append(Call(normal(world, rows, hidden), residual, normal(hidden), two_shot, add))
        made[-1].x[:, :, 5] = -0.0
        made[-1].x[:, :, 4] = 0.0
    return made


def wanted(call: Call, before: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    total = np.zeros(call.x.shape[1:], np.float32)
    for part in call.x:
        total += part.astype(np.float32)
    residual = (total + before.astype(np.float32) * call.add).astype(np.float16)
    squares = np.square(residual.astype(np.float32)).reshape(call.rows, call.parts, -1).sum(2).T
    return residual, (residual.astype(np.float32) * call.gain.astype(np.float32)).astype(np.float16), squares


def check(machine: PeerMachine, calls: list[Call]) -> None:
    before = [call.residual[0].copy() for call in calls]
    machine.run(calls)
    for call, residual in zip(calls, before, strict=True):
        new, scaled, squares = wanted(call, residual)
        for rank in range(machine.world):
            np.testing.assert_array_equal(call.residual[rank], new)
            np.testing.assert_array_equal(call.scaled[rank], scaled)
            np.testing.assert_allclose(call.squares[rank], squares, rtol=1e-5)
    assert (machine.arenas == peer_arena.EMPTY_WORD).all()


@pytest.mark.parametrize(("world", "seed"), WORLDS)
def test_all_ranks_get_the_sum_in_rank_order_in_any_order_of_delivery(world: int, seed: int) -> None:
    check(PeerMachine(world, 3, 7, seed), calls_of(seed, world, 8))


def test_a_region_is_used_again_many_times() -> None:
    check(PeerMachine(2, 1, 1, seed=1), calls_of(1, 2, 100, most_rows=1))


@pytest.mark.parametrize(
    "replacements",
    [
        {"(program.to(gl.int64) * 2 + (call & 1))": "(program.to(gl.int64) * 2)"},
        {"    send(address, words * 0 + EMPTY)\n": ""},
        {"gl.where(words == EMPTY, 0, words)": "words"},
        {"if owner != RANK:\n                at": "if owner == RANK:\n                at"},
    ],
    ids=["one half", "no write-back", "reserved value sent", "wrong owner"],
)
def test_a_broken_protocol_is_detected(replacements: dict[str, str]) -> None:
    with pytest.raises((Fault, AssertionError)):
        for seed in range(20):
            check(PeerMachine(3, 2, 10, seed, replacements), calls_of(seed, 3, 8))


def test_rows_that_do_not_divide_into_items_are_refused() -> None:
    assert all_reduce.block_words(1440) is None
    assert all_reduce.block_words(1792) == 256
    assert all_reduce.block_words(4096) == 512
