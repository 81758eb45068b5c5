"""Tests of the all-gather and of the selection of the best token. The simulated ranks receive words late, run
ahead of each other, and share arenas with all-reduces."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kernels.draws import BAD_TOKEN
from kernels.triton import peer_arena
from tests.kernels.peer_machine import AnyCall, Best, Call, Fault, Gather, PeerMachine
from tests.kernels.test_compiling import compiled
from tests.kernels.test_triton_all_reduce import WORLDS, calls_of, wanted

SPECIAL = np.array([-0.0, 0.0, np.nan, np.inf, -np.inf], np.float32)


def gather_of(chosen: random.Random, numbers: np.random.Generator, world: int) -> Gather:
    rows, width = chosen.randint(1, 6), chosen.choice((1, 2, 37, 128, 300))
    floats = numbers.standard_normal((world, rows * width)).astype(np.float32)
    floats[:, 0] = -0.0
    return Gather(floats.view(np.int32), width, chosen.choice((128, 512)))


def best_of(chosen: random.Random, numbers: np.random.Generator, world: int) -> Best:
    rows = chosen.choice((1, 7, 128, 200))
    values = numbers.integers(-2, 3, (world, rows)).astype(np.float32)  # many ties
    special = numbers.random((world, rows)) < 0.2
    values[special] = numbers.choice(SPECIAL, special.sum())
    ids = np.arange(world)[:, None] * 1000 + numbers.integers(0, 1000, (world, rows))
    return Best(values, ids.astype(np.int64))


def best_wanted(call: Best) -> np.ndarray:
    """Return the expected result of `engine.parallel.Ranks.best`: for each row, the id of the largest value
    (the first one in case of a tie), or BAD_TOKEN if that value is not finite. NaN counts as larger than any
    number."""
    found = []
    for values, ids in zip(call.values.T, call.ids.T, strict=True):
        missing = np.isnan(values)
        at = int(missing.argmax()) if missing.any() else int(values.argmax())
        found.append(ids[at] if np.isfinite(values[at]) else BAD_TOKEN)
    return np.array(found)


def mixed_calls(seed: int, world: int, count: int) -> list[AnyCall]:
    chosen, numbers = random.Random(seed), np.random.default_rng(seed)
    sums = iter(calls_of(seed, world, count))
    makers = (
        lambda: next(sums),
        lambda: gather_of(chosen, numbers, world),
        lambda: best_of(chosen, numbers, world),
    )
    return [chosen.choice(makers)() for _ in range(count)]


def check(machine: PeerMachine, calls: list[AnyCall]) -> None:
    before = [call.residual[0].copy() if isinstance(call, Call) else None for call in calls]
    machine.run(calls)
    for call, residual in zip(calls, before, strict=True):
        for rank in range(machine.world):
            if isinstance(call, Call):
                assert residual is not None
                np.testing.assert_array_equal(call.residual[rank], wanted(call, residual)[0])
            elif isinstance(call, Best):
                np.testing.assert_array_equal(call.result[rank], best_wanted(call))
            else:
                words = np.where(call.x == peer_arena.EMPTY_WORD, 0, call.x)
                rows = words.reshape(machine.world, -1, call.width).swapaxes(0, 1)
                np.testing.assert_array_equal(call.result[rank], rows)
    assert (machine.arenas == peer_arena.EMPTY_WORD).all()


@pytest.mark.parametrize(("world", "seed"), WORLDS)
def test_all_ranks_get_all_words_and_the_best_token_in_any_order_of_delivery(world: int, seed: int) -> None:
    check(PeerMachine(world, 3, 9, seed), mixed_calls(seed, world, 12))


def test_calls_of_every_kind_use_a_region_many_times() -> None:
    check(PeerMachine(2, 2, 9, seed=1), mixed_calls(1, 2, 80))


@pytest.mark.parametrize(
    "replacements",
    [
        {"payload(gl.load(x + index, mask=index < count, other=0))": "gl.load(x + index, index < count, 0)"},
        {"own_bits = payload(own_bits)\n": "\n"},
        {"token = receive(at + BLOCK * 4, stop)": "token = poll(at + BLOCK * 4, stop)"},
        {"words = receive(at, stop)\n            to": "words = poll(at, stop)\n            to"},
        {"send(peer + BLOCK * 4, own_ids)": "send(peer, own_ids)"},
    ],
    ids=[
        "reserved value gathered",
        "reserved value chosen",
        "no write-back of ids",
        "no write-back",
        "same item",
    ],
)
def test_a_broken_protocol_is_detected(replacements: dict[str, str]) -> None:
    with pytest.raises((Fault, AssertionError)):
        for seed in range(20):
            check(PeerMachine(3, 2, 20, seed, replacements), mixed_calls(seed, 3, 12))


def test_the_kernels_of_every_rank_compile_for_hopper() -> None:
    done = compiled("tests.kernels.peer_compiled")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["22", "kernels,", "0", "failures"]
