"""`python -m tests.gpu.rank_times`: show what each rank does during the steps of single prompts.

    python -m tests.gpu.rank_times --gpus 4 --shape llama-3.1-70b --layers 40 --fp8 --kv-fp8

The program prints a line for each rank and each step with a prompt. The line shows when the rank began and
ended its launch, relative to the start of rank 0's launch. It also shows how long each part of the launch
took, and how long the step took on the device. All times are in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.bench.shapes import SHAPES
from engine.core import LaunchedStep
from engine.garbage import settle_garbage
from engine.launched import StreamStep
from engine.messages import ReplicaSpec, SamplingParams
from engine.plan import StepPlan
from engine.runner import ModelRunner
from tests.engine.rank_group import Member, RankEngine, results, start_ranks

PARTS = ("apply", "stage", "replay", "sample", "eager")


class Timed:
    """A runner that records the times of its launches. It forwards all other calls to the runner that it
    wraps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._parts: dict[str, float] = {}
        self.steps: list[tuple[StepPlan, float, float, dict[str, float], StreamStep]] = []
        steps = runner.steps
        assert steps.prompt_graphs is not None
        steps.tables.apply = self._timed("apply", steps.tables.apply)  # type: ignore[method-assign]
        graphs: Any = steps.prompt_graphs
        graphs.stage = self._timed("stage", graphs.stage)
        graphs.forward = self._timed("replay", graphs.forward)
        decoder: Any = steps.decoder
        decoder.forward = self._timed("eager", decoder.forward)
        sampler: Any = steps.sampler
        sampler.sample = self._timed("sample", sampler.sample)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._parts = {}
        began = time.monotonic()
        launched = self._runner.launch(plan)
        assert isinstance(launched, StreamStep)
        self.steps.append((plan, began, time.monotonic(), self._parts, launched))
        return launched

    def lines(self) -> list[dict[str, Any]]:
        """Return the times of the steps with prompts."""
        found = []
        for plan, began, ended, parts, launched in self.steps:
            if plan.chunks:
                tokens = sum(len(chunk.token_ids) for chunk in plan.chunks)
                device = launched._began.elapsed_time(launched._ended)
                found.append({"tokens": tokens, "began": began, "ended": ended, "device": device, **parts})
        return found

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            began = time.monotonic()
            result = call(*arguments, **options)
            self._parts[name] = self._parts.get(name, 0.0) + 1e3 * (time.monotonic() - began)
            return result

        return run


def serve(member: Member, spec: ReplicaSpec, lengths: list[int], repeats: int) -> list[dict[str, Any]]:
    timed: Any = Timed(member.runner(spec))
    settle_garbage()
    if member.rank > 0:
        member.follow_rank_0(timed)
        return timed.lines()
    engine = RankEngine(spec, timed, member.peers)
    for length in lengths:
        for turn in range(repeats):
            prompt = [(7 * place + turn) % 900 + 3 for place in range(length)]
            engine.generate([prompt], SamplingParams(max_tokens=3, ignore_eos=True), cache_salt=f"{turn}")
    engine.release_peers()
    return timed.lines()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.rank_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--kv-fp8", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shape = SHAPES[options.shape] | {"num_hidden_layers": options.layers}
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        spec = ReplicaSpec(
            replica="times-0",
            model_path=folder,
            load_format="dummy",
            device="cuda",
            quantization="fp8" if options.fp8 else "auto",
            kv_cache_dtype="fp8" if options.kv_fp8 else "auto",
            tensor_parallel_size=options.gpus,
            max_num_seqs=64,
            max_num_batched_tokens=8192,
            max_model_len=max(options.lengths) + 64,
            kv_blocks=1024,
        )
        ranks = Path(folder) / "ranks"
        started = start_ranks(options.gpus, ranks, "cuda", serve, spec, options.lengths, options.repeats)
        found = results(started, ranks, 600)
    print(
        f"{'tokens':>6}{'rank':>5}{'began':>9}{'ended':>9}"
        + "".join(f"{part:>8}" for part in PARTS)
        + "  device"
    )
    for step in zip(*found, strict=True):
        for rank, times in enumerate(step):
            began, ended = (1e3 * (times[name] - step[0]["began"]) for name in ("began", "ended"))
            cells = "".join(f"{times.get(part, 0.0):8.2f}" for part in PARTS)
            tokens = f"{times['tokens']:6d}" if rank == 0 else " " * 6
            print(f"{tokens}{rank:5d}{began:9.2f}{ended:9.2f}{cells}{times['device']:8.2f}")


if __name__ == "__main__":
    main()
