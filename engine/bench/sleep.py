"""`python -m engine.bench.sleep`: measure how long a model takes to go to sleep, to wake up, and to generate
its first token.

    python -m engine.bench.sleep --shape llama-3.1-8b --rounds 10
    python -m engine.bench.sleep --shape llama-3.1-70b --fp8 --tensor-parallel-size 4 --json out.json

The model has random weights unless --model is given. Each round puts the replica to sleep, wakes it, and
generates one token for a new prompt. Time to first token is measured from the wake request. The "device"
columns show the memory used by all processes on the first GPU, while the replica sleeps and after the round.
The "host" column shows the resident memory of this process, which is rank 0. These values must not grow from
round to round. The answer to a fixed prompt, generated greedily, must be the same in every round.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from engine.bench.start import FAILURES, add_options, devices_text, leave, started
from engine.bench.workloads import EngineWorkload
from engine.generate import LocalEngine
from engine.memory import resident_bytes
from engine.messages import SamplingParams
from engine.rank_memory import SleepError
from engine.rank_messages import MemoryChanged
from kernels.writable import UnwritableError, check_writable

_WORKLOAD = EngineWorkload(1, 512, 64, "ms")
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements from one round of sleeping and waking."""

    sleep_s: float
    freed_bytes: int
    host_copy_bytes: int
    device_asleep_bytes: int
    wake_s: float
    first_token_s: float
    """Time from the wake request to the first token."""
    device_bytes: int
    host_bytes: int


def main() -> int:
    """Run the rounds and print a table. Returns 1 if the engine cannot start, sleep or wake, or if the greedy
    answer changes."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        try:
            check_writable("--json", arguments.json)
            with started(arguments, Path(scratch), {"sleep": _WORKLOAD}) as engine:
                return _run(engine, arguments)
        except (UnwritableError, SleepError, *FAILURES) as error:
            print(error, file=sys.stderr)
            return 1


def _run(engine: LocalEngine, arguments: argparse.Namespace) -> int:
    info = engine.info
    print(
        f"{arguments.model or arguments.shape} on {devices_text(info)}: weights "
        f"{info.weight_bytes / _GIB:.1f} GiB, KV {info.kv_bytes / _GIB:.1f} GiB"
    )
    expected, rounds = _answer(engine, 64), []
    print("round  sleep s  freed GiB  device asleep GiB  wake s  first token s  device GiB  host GiB")
    for number in range(1, arguments.rounds + 1):
        rounds.append(one := _round(engine))
        print(
            f"{number:5}  {one.sleep_s:7.2f}  {one.freed_bytes / _GIB:9.1f}  "
            f"{one.device_asleep_bytes / _GIB:17.2f}  {one.wake_s:6.3f}  {one.first_token_s:13.3f}  "
            f"{one.device_bytes / _GIB:10.2f}  {one.host_bytes / _GIB:8.2f}",
            flush=True,
        )
        if _answer(engine, 64) != expected:
            print("the greedy answer changed after waking", file=sys.stderr)
            return 1
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(one) for one in rounds], indent=1) + "\n")
    return 0


def _round(engine: LocalEngine) -> Round:
    slept = _change(engine, True)
    asleep = _device_bytes()
    began = time.perf_counter()
    woken = _change(engine, False)
    _answer(engine, 1)
    first_token_s = time.perf_counter() - began
    # Wait until the copies of the weights in host memory have been freed in the background.
    engine.runner.memory.check(engine.info.tensor_parallel_size)
    return Round(
        sleep_s=slept.seconds,
        freed_bytes=slept.freed_bytes,
        host_copy_bytes=slept.host_bytes,
        device_asleep_bytes=asleep,
        wake_s=woken.seconds,
        first_token_s=first_token_s,
        device_bytes=_device_bytes(),
        host_bytes=resident_bytes(),
    )


def _change(engine: LocalEngine, asleep: bool) -> MemoryChanged:
    changed = engine.change_memory(asleep)
    if changed.problem:
        raise SleepError(changed.problem)
    return changed


def _answer(engine: LocalEngine, tokens: int) -> list[int]:
    """Return the token IDs of the greedy answer to a fixed prompt. A new cache salt keeps the prompt from
    being found in the prefix cache, so the prompt is computed every time."""
    prompt = [(7 * place + 3) % engine.info.vocab_size for place in range(_WORKLOAD.prompt_tokens)]
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    ((sample,),) = engine.generate([prompt], sampling, cache_salt=str(time.perf_counter_ns()))
    return sample.token_ids


def _device_bytes() -> int:
    """Return the memory used on the first GPU, in bytes, or 0 if there is no GPU."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.sleep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the measurements of all rounds to this file")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds is {arguments.rounds}; it must be at least 1")
    return arguments


if __name__ == "__main__":
    leave(main())
