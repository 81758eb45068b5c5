"""Reuses a region of an arena many times with two ranks: `python -m tests.kernels.soak_all_reduce --calls
100000`."""

from __future__ import annotations

import argparse

from tests.kernels.peer_machine import PeerMachine
from tests.kernels.test_triton_all_reduce import calls_of, check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100_000)
    left = parser.parse_args().calls
    machine, seed = PeerMachine(2, 1, 1, seed=1), 0
    while left > 0:
        check(machine, calls_of(seed, 2, min(left, 500), most_rows=1))
        left, seed = left - 500, seed + 1
    print("every sum was exact")


if __name__ == "__main__":
    main()
