"""`python -m engine.bench.passes`: time a forward pass of one prompt on several GPUs with different
collectives.

    python -m engine.bench.passes --gpus 4 --shape llama-3.1-70b --layers 16 --fp8 --kv-fp8
    python -m engine.bench.passes --gpus 2 --shape llama-3.1-8b --tokens 256 512 1024

The model consists of a few layers of a public model's shape, with random weights. All ranks start each pass
at the same time; no plan channels are used. For each variant, the table shows device times in milliseconds:
the first pass, the second pass, the median and the slowest of all passes, and the slowest rank's median.
"host" is the median time that the host takes to launch a pass. "differs" is the relative difference between
the variant's logits and those of the eager variant. The variants are:

    default      as in serving: CUDA graphs, and the collectives of `engine.peer_limits`
    layers       one CUDA graph per layer (`engine.layer_graphs`), even for short prompts
    eager        each kernel is launched separately
    one-shot     every all-reduce that fits is one-shot
    two-shot     every all-reduce that fits is two-shot
    group        every all-reduce uses NCCL
    whole        long passes are eager and not divided into halves
    no PDL       without programmatic dependent launch
    alone        no all-reduce: only the computation is timed, and the results are wrong

After the table, the kernels of the first and last ranks are listed for each variant given with --profile.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine import parallel
from engine.bench.shapes import SHAPES, write_config
from engine.config import ModelConfig
from engine.device_tables import SlotTables
from engine.families import read_config
from engine.halves_graphs import HalvesGraphs
from engine.layer_graphs import LayerGraphs
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.model.loader import load_dummy
from engine.peer_limits import UNLIMITED
from engine.peer_ranks import PeerRanks
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.profile.trace import read_timeline
from engine.progress import no_progress
from engine.prompt_graphs import PromptGraphs
from engine.sizing import EXPANSION_BLOCKS
from kernels import NextNorm, Residual, select_backend
from kernels.cuda import CudaOps

VARIANTS = ("default", "layers", "eager", "no PDL", "one-shot", "two-shot", "group", "whole", "alone")
_COLUMNS = ("first", "second", "median", "slowest", "ranks", "host", "differs")
_PASSES = 12
_KERNELS_SHOWN = 9


def main() -> int:
    """Run the variants on the first `--gpus` GPUs of this machine and print a table. Returns 1 if there are
    too few GPUs."""
    arguments = _arguments()
    if torch.cuda.device_count() < arguments.gpus:
        print(
            f"--gpus is {arguments.gpus}, but this machine has {torch.cuda.device_count()}", file=sys.stderr
        )
        return 1
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        write_config(arguments.shape, Path(folder))
        torch.multiprocessing.spawn(_rank, (arguments, folder), nprocs=arguments.gpus)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.passes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, default=2, help="number of ranks, one per GPU (%(default)s)")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-70b")
    parser.add_argument("--layers", type=int, default=16, help="number of layers (%(default)s)")
    parser.add_argument("--fp8", action="store_true", help="quantise the layers' weights")
    parser.add_argument("--kv-fp8", action="store_true", help="quantise the KV cache")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512], help="prompt lengths in tokens")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT")
    parser.add_argument("--profile", nargs="*", choices=VARIANTS, default=["default"], metavar="VARIANT")
    arguments = parser.parse_args()
    if arguments.gpus < 2:
        parser.error(f"--gpus is {arguments.gpus}; at least 2 are needed")
    return arguments


def _rank(rank: int, arguments: argparse.Namespace, folder: str) -> None:
    torch.cuda.set_device(rank)
    ranks = parallel.join(arguments.gpus, rank, f"{folder}/store", "nccl")
    if not isinstance(ranks, PeerRanks):
        raise SystemExit("the GPUs cannot access each other's memory")
    with torch.inference_mode():
        bench = _Bench(arguments, read_config(Path(folder)), ranks)
        if rank == 0:
            name = torch.cuda.get_device_name()
            print(f"{arguments.layers} layers of {arguments.shape}, {arguments.gpus} × {name}")
            print(f"{'tokens':>6} {'variant':10}" + "".join(f"{name:>9}" for name in _COLUMNS))
        for tokens in arguments.tokens:
            for variant in arguments.variants:
                bench.measure(variant, tokens)
        for variant in arguments.profile:
            bench.profile(variant, arguments.tokens[-1], Path(folder))
    sys.stdout.flush()
    os._exit(0)  # torch.distributed's threads could block a normal exit


class _Alone(parallel.Ranks):
    """Collectives that do not communicate: each rank uses its own summand instead of the sum over all
    ranks."""

    def __init__(self, ranks: PeerRanks) -> None:
        self.size, self.rank = ranks.size, ranks.rank

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def add_sum(self, residual: Residual, part: torch.Tensor, norm: NextNorm | None) -> Residual:
        return Residual(residual.values.add_(part))


class _Bench:
    """One rank of the benchmark, with its shard of the model."""

    def __init__(self, arguments: argparse.Namespace, config: ModelConfig, ranks: PeerRanks) -> None:
        self._ranks = ranks
        self._longest = max(arguments.tokens)
        self._device = torch.device("cuda", torch.cuda.current_device())
        dtype = TORCH_DTYPES[config.dtype]
        self._decoder = Decoder(
            config.with_layers(list(range(arguments.layers))),
            ranks,
            select_backend("cuda", dtype, EXPANSION_BLOCKS),
            dtype,
            self._device,
            max_model_len=self._longest + BLOCK_TOKENS,
            fp8=arguments.fp8,
            kv_fp8=arguments.kv_fp8,
        )
        ranks.prepare_overlap(self._longest, config.hidden_size, dtype, self._device)
        load_dummy(self._decoder, 0)
        short = [tokens for tokens in arguments.tokens if ranks.overlap(tokens) is None]
        self._layers = LayerGraphs(self._decoder, short) if short else None
        long, overlap = [*set(arguments.tokens) - set(short)], ranks.overlap(self._longest)
        self._halves = HalvesGraphs(self._decoder, overlap, long) if overlap is not None else None
        for graphs in (self._layers, self._halves):
            if graphs is not None:
                graphs.capture(no_progress)
        self._expected: dict[int, torch.Tensor] = {}
        """The eager variant's logits, keyed by number of tokens."""
        self._blocks = -(-self._longest // BLOCK_TOKENS) + 1
        self._kv = self._decoder.allocate_kv(self._blocks)
        self._tables = SlotTables(8, self._blocks, config.vocab_size, self._device)

    def measure(self, variant: str, tokens: int) -> None:
        """Time a variant's passes and print a line on rank 0."""
        run = self._prepare(variant, tokens)
        times, host = zip(*(self._time(run) for _ in range(_PASSES)), strict=True)
        if tokens not in self._expected:
            self._expected[tokens] = self._prepare("eager", tokens)().float().clone()
        wanted = self._expected[tokens]
        differs = float((run().float() - wanted).norm() / wanted.norm())
        median = torch.tensor([statistics.median(times)], device=self._device)
        slowest = float(self._ranks.all_gather_stack(median).max())
        if self._ranks.rank == 0:
            medians = statistics.median(times), statistics.median(host)
            cells = (times[0], times[1], medians[0], max(times), slowest, medians[1])
            numbers = "".join(f"{cell:9.2f}" for cell in cells)
            print(f"{tokens:6d} {variant:10}{numbers}{differs:9.4f}", flush=True)

    def profile(self, variant: str, tokens: int, folder: Path) -> None:
        """Print the kernels that the first and last ranks run in one pass of a variant."""
        run = self._prepare(variant, tokens)
        for _ in range(2):
            self._time(run)
        rank, size = self._ranks.rank, self._ranks.size
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recording:
            self._time(run)
        path = folder / f"trace-{rank}.json"
        recording.export_chrome_trace(str(path))
        timeline = read_timeline(path)
        us, calls = defaultdict[str, float](float), defaultdict[str, int](int)
        for call in timeline.calls:
            us[call.name] += call.us
            calls[call.name] += 1
        gaps = sum(call.gap_us for call in timeline.calls)
        for turn in range(size):
            self._barrier()
            if turn == rank and rank in (0, size - 1):
                print(f"rank {rank}, {variant}, {tokens} tokens: {timeline.us:,.0f} µs, gaps {gaps:,.0f}")
                for name in sorted(us, key=lambda name: -us[name])[:_KERNELS_SHOWN]:
                    print(f"  {name[:46]:46}{calls[name]:6d}{us[name]:10,.0f}{us[name] / calls[name]:9,.1f}")
                sys.stdout.flush()

    def _prepare(self, variant: str, tokens: int) -> Callable[[], torch.Tensor]:
        """Return a function that launches a pass of `tokens` tokens. The function has already been called
        once."""
        plan = self._plan(tokens)
        self._tables.apply(plan)
        with self._variant(variant) as decoder:
            graphs = PromptGraphs(decoder, self._kv, self._tables, tokens)
            if variant not in ("eager", "layers") and graphs.fits(plan):
                graphs.sizes = graphs.sizes[-1:]
                decoder.layer_graphs = decoder.halves_graphs = None  # a capture must not replay other graphs
                graphs.capture(no_progress)
                graphs.stage(plan)
                return graphs.forward
        batch = self._tables.step_batch(plan)

        def run() -> torch.Tensor:
            with self._variant(variant) as decoder:
                return decoder.logits(decoder.forward(batch.forward, self._kv))

        run()
        return run

    @contextlib.contextmanager
    def _variant(self, variant: str) -> Iterator[Decoder]:
        """Yield a decoder that launches a variant's kernels until the `with` statement ends."""
        ranks, decoder = self._ranks, copy.copy(self._decoder)
        ops, limits, pdl, overlap_from = decoder.ops, ranks.limits, ranks.pdl, ranks.overlap_from
        assert isinstance(ops, CudaOps)
        if variant in ("default", "layers"):
            decoder.layer_graphs, decoder.halves_graphs = self._layers, self._halves
        elif variant == "no PDL":
            ranks.pdl = ops.pdl = False
        elif variant == "one-shot":
            ranks.limits = replace(limits, two_shot_bytes=UNLIMITED)
        elif variant == "two-shot":
            ranks.limits = replace(limits, two_shot_bytes=0)
        elif variant == "group":
            ranks.limits = replace(limits, group_bytes=0)
        elif variant == "whole":
            ranks.overlap_from = None
        elif variant == "alone":
            decoder.ranks = _Alone(ranks)
        yield decoder
        ranks.limits, ranks.overlap_from = limits, overlap_from
        ranks.pdl = ops.pdl = pdl

    def _plan(self, tokens: int) -> StepPlan:
        setups = [SlotSetup(0, SamplingParams(max_tokens=1), 0, tokens, [])]
        blocks = [(0, index, index) for index in range(self._blocks)]
        prompt = [(7 * place) % 900 + 3 for place in range(tokens)]
        return StepPlan(0, setups, blocks, [], [], [Chunk(0, 0, prompt, [0])])

    def _time(self, run: Callable[[], torch.Tensor]) -> tuple[float, float]:
        """Start a pass on all ranks at the same time. Returns the device time and the host's launch time in
        milliseconds."""
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._barrier()
        called = time.perf_counter()
        began.record()
        run()
        ended.record()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        return began.elapsed_time(ended), 1e3 * (launched - called)

    def _barrier(self) -> None:
        self._ranks.all_gather_stack(torch.zeros(1, dtype=torch.int32, device=self._device))
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
