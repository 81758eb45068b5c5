"""Soak test: random traffic through one engine, `python -m tests.engine.soak --minutes 30`.

Requests arrive in bursts and lulls. Their prompts range from one token to several times a step's token
budget, and some prompts share prefixes. The traffic includes requests with several samples, every kind of
sampling, cancellations at any moment, preemptions, invalid requests and non-finite values. After each round,
the test checks that every request ended exactly once with the right result, that all slots, blocks and
credits are free, and that memory use has not grown. Requests with known outputs run between the others
(`soak_known`).

On a GPU: `python -m tests.engine.soak --minutes 5 --device cuda --shape llama-3.1-8b`, and for FP8 with
`--spec quantization=fp8 --spec kv_cache_dtype=fp8`. `--spec tensor_parallel_size=4` splits the model over
four ranks. With --fill, one wave of long sequences takes every block of a pool that is sized from the
available memory (`soak_fill`).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.bench.shapes import SHAPES, write_config
from engine.bench.start import FAILURES, closed_at_end, devices_text, leave
from engine.generate import LocalEngine
from engine.memory import resident_bytes
from engine.messages import ReplicaSpec, SamplingParams, Submit, pack_tokens
from tests.engine.output_checker import OutputChecker
from tests.engine.soak_known import KINDS, Known
from tests.engine.soak_traffic import Cancelled, Limits, Rhythm, draw_submit
from tests.engine.tiny import TINY

TINY_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 96, "kv_blocks": 16, "max_model_len": 400}
SIZES = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "kv_blocks": 900, "max_model_len": 6000}
"""Sizes for KV pools that are too small for all running sequences, so that some sequences are preempted."""
FILL_SIZES = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "kv_blocks": None, "max_model_len": 4096}
"""Sizes for a KV pool that is sized from the available memory."""

GROWTH = {"objects": 200, "host_bytes": 32 << 20, "device_bytes": 1 << 20, "device_used_bytes": 512 << 20}
"""Maximum growth of each measurement's median from the second to the last quarter of a run. The measurements
are the number of Python objects, the process's memory in bytes, the size of tensors on the device in bytes,
and all used device memory in bytes. The process's memory grows because libraries keep code for each new
shape: 150 MiB in the first minutes, then less and less. Used device memory grows because torch's allocator
keeps memory that it has used."""
HOST_FROM_S = 600
"""Time in seconds from the start of the run from which on the process's memory is checked."""

STALLED_S = 300
"""Time in seconds after which a round counts as hung. The test then prints the stack of each thread."""


@dataclass(slots=True)
class Calm:
    """Memory use while the engine is idle."""

    seconds: float
    objects: int
    """Number of Python objects known to the garbage collector."""
    host_bytes: int
    device_bytes: int
    """Size of the tensors on the device, in bytes."""
    device_used_bytes: int
    """Memory in use on the whole device, in bytes."""


@dataclass(slots=True)
class Soak:
    """One engine, its simulated clients, and the state of their requests."""

    engine: LocalEngine
    draw: random.Random
    near_tie: float
    known_requests: int = KINDS
    limits: Limits = field(init=False)
    checker: OutputChecker = field(init=False)
    known: Known = field(init=False)
    rhythm: Rhythm = field(init=False)
    cancelled: Cancelled = field(default_factory=Cancelled)
    calms: list[Calm] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    began: float = field(default_factory=time.monotonic)
    poisonous: bool = False
    handles: int = 0
    fronts: list[int] = field(default_factory=lambda: [0, 1])
    credit_tokens: int = 0
    """Credit that the engine has granted, in tokens."""
    credits_spent: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        self.limits = Limits.of(self.engine.info)
        self.credit_tokens = self.engine.core.gauges().credit_tokens
        self.checker = OutputChecker(self.limits.max_model_len, self.limits.vocab, self.limits.poison)
        self.rhythm = Rhythm(self.draw, self.limits.rows)
        self.known = Known(self.engine, self.limits, self.draw, self.near_tie, self.known_requests)
        gauges = self.engine.core.gauges()
        self.credits_spent = (
            gauges.credit_seqs - self.limits.rows,
            gauges.credit_tokens - self.credit_tokens,
        )

    # ── a round ──────────────────────────────────────────────────────────────────────────────────

    def round(self, steps: int) -> None:
        """Run a round: generate random traffic for some steps, let all open requests finish, and run the
        checks."""
        faulthandler.dump_traceback_later(STALLED_S, exit=True)
        # With tied embeddings, a NaN in the embedding would make every logit NaN.
        armed = self.draw.random() < 0.2 and not self.engine.runner.config.tie_word_embeddings
        with Poison(self.engine, self.limits.poison, armed) as self.poisonous:
            for _ in range(steps):
                for _ in range(self.rhythm.arrivals()):
                    self._arrive()
                self._cancel()
                self._step()
            while self.engine.core.has_work:
                if self.draw.random() < 0.02:
                    self._cancel()
                self._step()
        self._fill_rows()
        self._expect_order()
        self.counts["rounds"] += 1
        faulthandler.cancel_dump_traceback_later()

    def _arrive(self) -> None:
        if len(self.checker.open) > 12 * self.limits.rows:
            return
        if self.draw.random() < 0.15:
            self._submit("known", self.known.submit(self._handle()), "")
            return
        poison = self.limits.poison if self.poisonous else None
        submit, wrong = draw_submit(self.draw, self._handle(), self.limits, poison)
        self._submit(f"front-{self.draw.choice(self.fronts)}", submit, wrong)

    def _handle(self) -> int:
        self.handles += 1
        return self.handles

    def _submit(self, origin: str, submit: Submit, wrong: str) -> None:
        rows, tokens = self.credits_spent
        self.credits_spent = (rows + max(submit.n, 0), tokens + submit.credit_tokens)
        self.checker.submitted(origin, submit, wrong)
        self.engine.scheduler.add(origin, submit)

    def _cancel(self) -> None:
        """Occasionally cancel a sample, a request, or all requests of a front."""
        if self.draw.random() > 0.06:
            return
        core, open_ = self.engine.core, self.checker.open
        asked = [handle for handle, entry in open_.items() if entry.origin != "known" and not entry.deaf]
        if not asked:
            return
        handle = self.draw.choice(asked)
        entry = open_[handle]
        how = self.draw.random()
        if how < 0.04:
            for each in asked:
                if open_[each].origin == entry.origin:
                    self.cancelled.note(core, entry.origin, each, None)
            self.checker.front_disconnected(entry.origin)
            core.scheduler.cancel_origin(entry.origin)
            self.fronts[self.fronts.index(int(entry.origin.rpartition("-")[2]))] = max(self.fronts) + 1
            self.counts["fronts disconnected"] += 1
            return
        sample = self.draw.choice(list(entry.samples)) if how < 0.4 else None
        self.cancelled.note(core, entry.origin, handle, sample)
        self.checker.cancelled(handle, sample)
        if sample is None and how > 0.9:
            core.scheduler.cancel_request(entry.submit.request_id)
        else:
            core.scheduler.cancel(entry.origin, handle, sample)

    def _step(self) -> None:
        self.checker.take(self.engine.core.step())
        self.counts["steps"] += 1
        for entry in self.checker.done:
            if entry.origin == "known":
                self.known.check(entry)
        self.checker.done.clear()
        if self.counts["steps"] % 64 == 0:
            self.engine.scheduler.check()
        pool = self.engine.scheduler.pool
        self.counts["most blocks used"] = max(self.counts["most blocks used"], pool.used)

    def _fill_rows(self) -> None:
        """Run a plain request in every slot, so that the slot tables release the state of earlier
        requests."""
        for number in range(self.limits.rows):
            submit = Submit(
                handle=self._handle(),
                request_id=f"request-{self.handles}",
                prompt=pack_tokens([3 + number]),
                sampling=SamplingParams(max_tokens=2),
            )
            self._submit("filler", submit, "")
        while self.engine.core.has_work:
            self._step()

    # ── checks after a round ────────────────────────────────────────────────────────────────────────────────

    def _expect_order(self) -> None:
        """Check that all slots, blocks and credits are free again, and record the memory use."""
        scheduler, gauges = self.engine.scheduler, self.engine.core.gauges()
        self.engine.scheduler.check()
        scheduler.pool.check([])
        assert not self.checker.open, f"never ended: {list(self.checker.open.values())[:3]}"
        assert gauges.running == gauges.waiting == gauges.blocks_used == 0, gauges
        assert scheduler.pool.available == scheduler.pool.total
        credits = (gauges.credit_seqs - self.limits.rows, gauges.credit_tokens - self.credit_tokens)
        assert credits == self.credits_spent, (
            f"{credits} credits were returned, but {self.credits_spent} were spent"
        )
        # The pool must be large enough that the requests above have used every slot.
        if scheduler.pool.total > self.limits.rows + scheduler.watermark:
            assert self.engine.runner.steps.tables.sampling.counts is None, (
                "penalty counts were kept after their requests ended"
            )
        gc.collect()
        seconds = time.monotonic() - self.began
        allocated = used = 0
        if self.engine.runner.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            allocated, used = torch.cuda.memory_allocated(), total - free
        objects = len(gc.get_objects()) - len(self.calms)
        self.calms.append(Calm(seconds, objects, resident_bytes(), allocated, used))

    def growth(self) -> dict[str, int]:
        """Return the growth of each memory measurement from the second to the last quarter of the run."""
        quarter = max(1, len(self.calms) // 4)
        early, late = self.calms[quarter : 2 * quarter] or self.calms[:1], self.calms[-quarter:]
        return {
            name: int(statistics.median(getattr(calm, name) for calm in late))
            - int(statistics.median(getattr(calm, name) for calm in early))
            for name in GROWTH
        }

    def expect_no_growth(self) -> None:
        judged = [name for name in GROWTH if name != "host_bytes" or self.calms[-1].seconds > HOST_FROM_S]
        growth = self.growth()
        over = {name: growth[name] for name in judged if growth[name] > GROWTH[name]}
        assert not over, f"memory use grew from the second to the last quarter of the run: {over}"

    def summary(self) -> dict[str, Any]:
        gauges = self.engine.core.gauges()
        return {
            "seconds": round(time.monotonic() - self.began, 1),
            **{
                name: self.counts[name]
                for name in ("rounds", "steps", "fronts disconnected", "most blocks used")
            },
            "preemptions": gauges.preemptions,
            "cached_tokens": gauges.cached_tokens,
            "cancelled": dict(self.cancelled.where),
            "ended": dict(self.checker.counts),
            "known": {**self.known.counts, "largest_error_nats": round(self.known.largest_error, 7)},
        }


class Poison:
    """A context manager that sets a token's embedding to NaN if `armed` is true. Yields whether it has
    changed the embedding."""

    def __init__(self, engine: LocalEngine, token: int, armed: bool) -> None:
        self._row = engine.runner.decoder.embedding[token]
        self._armed = armed
        self._sound = self._row.clone()

    def __enter__(self) -> bool:
        if self._armed:
            with torch.inference_mode():
                self._row.fill_(float("nan"))
        return self._armed

    def __exit__(self, *_: object) -> None:
        with torch.inference_mode():
            self._row.copy_(self._sound)


# ── the command ──────────────────────────────────────────────────────────────────────────────────────


def build(arguments: argparse.Namespace, folder: Path) -> LocalEngine:
    """Return the engine that the arguments describe, with random weights."""
    tiny = arguments.shape == "tiny"
    if tiny:
        (folder / "config.json").write_text(json.dumps(TINY))
    else:
        write_config(arguments.shape, folder)
    given = {
        name: getattr(arguments, name)
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_blocks", "max_model_len")
        if getattr(arguments, name) is not None
    }
    defaults: dict[str, Any] = TINY_SIZES if tiny else FILL_SIZES if arguments.fill else SIZES
    if tiny and arguments.fill:
        defaults = TINY_SIZES | {"kv_blocks": 20}  # so that all slots fit at the same time
    sizes = {**defaults, **given}
    fields: dict[str, Any] = {
        "replica": "soak-0",
        "model_path": str(folder),
        "load_format": "dummy",
        "device": arguments.device,
        "threads": 1 if arguments.device == "cpu" else None,
        **sizes,
        **dict(option.split("=", 1) for option in arguments.spec),
    }
    return LocalEngine(msgspec.convert(fields, ReplicaSpec, strict=False))


def main(given: list[str] | None = None) -> int:
    """Run rounds, print a line each minute, and print statistics at the end. Return 1 if anything
    went wrong."""
    arguments = _arguments(given)
    with tempfile.TemporaryDirectory(prefix="engine-soak-") as folder:
        try:
            with closed_at_end(build(arguments, Path(folder))) as engine:
                info, stats = _run(engine, arguments)
        except FAILURES as error:
            print(error, file=sys.stderr)
            return 1
    report = {"command": " ".join(sys.argv[1:]), "torch": str(torch.__version__), "info": info, **stats}
    print(json.dumps({name: value for name, value in report.items() if name != "memory"}))
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if stats["wrong"] is None else 1


def _run(engine: LocalEngine, arguments: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the engine's properties and the run's statistics."""
    info: dict[str, Any] = msgspec.to_builtins(engine.info)
    print(
        f"{arguments.shape} on {devices_text(engine.info)}, {info['dtype']}: {info['kv_blocks']} blocks, "
        f"{info['max_num_seqs']} slots, {info['max_num_batched_tokens']} tokens per step",
        flush=True,
    )
    if arguments.fill:
        from tests.engine.soak_fill import fill

        return info, fill(engine)
    return info, soak(engine, arguments)


def soak(engine: LocalEngine, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run rounds until the time limit or the number of rounds is reached."""
    draw = random.Random(arguments.seed)
    running = Soak(engine, draw, arguments.near_tie, arguments.known)
    wrong = None
    told = 0.0
    try:
        while not _over(running, arguments):
            running.round(draw.randint(50, 400))
            if running.calms[-1].seconds - told > 60:
                told = running.calms[-1].seconds
                print(json.dumps({**running.summary(), "growth": running.growth()}), flush=True)
        running.expect_no_growth()
    except AssertionError as error:
        wrong = str(error) or repr(error)
        print(f"WRONG: {wrong}", file=sys.stderr, flush=True)
    every = max(1, len(running.calms) // 60)
    return {
        "wrong": wrong,
        **running.summary(),
        "growth": running.growth() if running.calms else {},
        "memory": [asdict(calm) for calm in running.calms[::every]],
    }


def _over(running: Soak, arguments: argparse.Namespace) -> bool:
    if arguments.rounds is not None:
        return running.counts["rounds"] >= arguments.rounds
    return time.monotonic() - running.began > 60 * arguments.minutes


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.engine.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of a duration")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--known", type=int, default=KINDS, help="number of requests with known outputs (%(default)s)"
    )
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--shape", default="tiny", choices=["tiny", *sorted(SHAPES)])
    parser.add_argument(
        "--near-tie",
        type=float,
        help="maximum difference of log probabilities in nats at which tokens may "
        "differ (default: 1e-4, or 0.15 in 16 bits and 0.5 in 8 bits); the "
        "largest difference is reported",
    )
    for name in ("max-num-seqs", "max-num-batched-tokens", "kv-blocks", "max-model-len"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--spec", action="append", default=[], metavar="FIELD=VALUE", help="set a field of ReplicaSpec"
    )
    parser.add_argument(
        "--fill", action="store_true", help="fill every block once, and report the memory use"
    )
    parser.add_argument("--json", type=Path, help="write the statistics to this file")
    arguments = parser.parse_args(given)
    if arguments.near_tie is None:
        eight_bits = any("fp8" in option for option in arguments.spec)
        arguments.near_tie = 0.5 if eight_bits else 1e-4 if arguments.shape == "tiny" else 0.15
    return arguments


if __name__ == "__main__":
    leave(main())
