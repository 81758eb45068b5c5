"""Defines one rank of a replica, which executes plans with its decoder, KV pools, device tables and sampler.
Steps (`engine.steps`) run in launch order on one stream: the current CUDA stream, or a worker thread on a
CPU. Meanwhile, the step loop reads messages, plans the next step, and sends outputs.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import torch

from engine import memory
from engine.ceilings import min_times
from engine.config import FP8_BLOCK_INPUTS, ModelConfig
from engine.core import LaunchedStep
from engine.device import device_name, select_device
from engine.device_tables import Padding, SlotTables
from engine.families import read_config
from engine.kernel_build import KernelBuild, check_kernels, start_build
from engine.kv_memory import RankKvCache
from engine.launched import StepResults, StreamStep, ThreadStep, read_results, to_host
from engine.messages import BLOCK_TOKENS, DType, KvDType, ModelDType, ReplicaInfo, ReplicaSpec
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.model.loader import load, load_dummy
from engine.parallel import Ranks
from engine.plan import StepPlan, StepTokens
from engine.progress import ProgressCallback, StageTimes
from engine.rank_memory import open_memory
from engine.rank_messages import MemoryChanged, Progress
from engine.replica_model import ReplicaModel
from engine.sampler import Sampler
from engine.scheduling.scheduler import default_mixed_tokens
from engine.sizing import (
    EXPANSION_BLOCKS,
    FP8,
    FP8_BLOCKS,
    Sizing,
    gemm_sizes,
    kv_bytes_per_block,
    layer_capture_sizes,
    parameters,
    pass_sizes,
    predict,
    size_for,
    weights_dtype,
)
from engine.sleeping import RankSleep
from engine.spec_checks import check_spec
from engine.step_memory import run_largest_steps, steps_fit
from engine.steps import StepExecutor
from engine.transfer import reserve_pinned
from engine.warmup import warm_up
from kernels import KvPool, select_backend, select_sampling

if TYPE_CHECKING:
    from engine.halves_graphs import HalvesGraphs
    from engine.layer_graphs import LayerGraphs

log = logging.getLogger(__name__)

_BYTES_PER_PROMPT_TOKEN = 4 * 8
"""Bytes transferred per prompt token in a step: four int64 numbers."""


class ModelRunner:
    """A loaded rank of a replica, which executes steps.

    The constructor requires connected `ranks`. With NCCL, `select_device` must be called before the ranks are
    connected.

    The constructor raises:

        CheckpointError     if files are invalid
        UnsupportedError    if `spec` has invalid fields, or if the GPU kernels do not support the model
        DeviceError         if a device is missing
        WeightsTooLarge     if the weights do not fit on the device
        StepsTooLarge       if the activations do not fit on the device
        PoolTooSmall        if the KV pool is too small for a sequence of `spec.max_model_len` tokens
        PoolTooLarge        if `spec.kv_blocks` blocks do not fit into memory

    UnsupportedError is also raised if the model does not allow the number of ranks or the sequence length.
    """

    def __init__(self, spec: ReplicaSpec, ranks: Ranks, progress: ProgressCallback) -> None:
        began = time.monotonic()
        stages = progress = StageTimes(progress)
        check_spec(spec)
        self.spec = spec
        self.ranks = ranks
        self.device = select_device(spec.device, ranks.rank, ranks.size)
        if spec.device == "auto" and self.device.type == "cpu":
            progress(Progress("start", note="no GPU found: using the CPU"))
        self._threads = _threads(spec, ranks.size)
        torch.set_num_threads(self._threads)
        resident = memory.resident_bytes()
        self.config = read_config(spec.model_path)
        if spec.expert_parallel:
            self.config = self.config.with_whole_experts()
        self.dtype = _dtype_name(spec.dtype, self.config, self.device)
        on_gpu = self.device.type == "cuda"
        self.weights = weights_dtype(
            self.config, spec.quantization, self.dtype, on_gpu=on_gpu, tensor_parallel_size=ranks.size
        )
        if self.config.fp8_blocks and self.weights == FP8:
            log.info(
                "converting the checkpoint's FP8 block scales to one scale per output: %s",
                'quantization is "fp8"'
                if spec.quantization == FP8
                else f"with tensor_parallel_size = {ranks.size}, the number of inputs of a rank's matrices "
                f"is not always a multiple of {FP8_BLOCK_INPUTS}, as the GPU kernels need for block scales",
            )
        self.kv_cache_dtype: KvDType = FP8 if spec.kv_cache_dtype == FP8 else self.dtype
        self.max_model_len = self._initial_max_model_len()
        sizes = self.config, ranks.size, spec.max_num_batched_tokens
        self._captured_sizes = layer_capture_sizes(*sizes) if on_gpu else []
        self._padding = Padding(pass_sizes(*sizes), gemm_sizes(spec.max_num_seqs))
        self._failed: BaseException | None = None
        self._ended_at: float | None = None
        self._ended_event: torch.cuda.Event | None = None
        self._stream: ThreadPoolExecutor | None = None
        self._memory_thread: ThreadPoolExecutor | None = None
        building = self._start_build()
        self.memory = open_memory(self.device, ranks.size)
        # This function must not refer to the runner, or deleting the runner would not free its memory
        # immediately.
        self._sleep = RankSleep(self.memory, ranks.size, partial(_totals, ranks, self.device))
        with torch.inference_mode():
            self.decoder = Decoder(
                self.config,
                ranks,
                select_backend(self.device.type, TORCH_DTYPES[self.dtype], EXPANSION_BLOCKS),
                TORCH_DTYPES[self.dtype],
                self.device,
                max_model_len=self.max_model_len,
                fp8=self.weights != self.dtype,
                fp8_blocks=self.weights == FP8_BLOCKS,
                kv_fp8=self.kv_cache_dtype == FP8,
                memory=self.memory,
            )
            # The KV pool's size is determined later, because the pool gets the remaining memory.
            ranks.prepare_overlap(
                spec.max_num_batched_tokens, self.config.hidden_size, self.decoder.dtype, self.device
            )
            self._barrier()  # all ranks must measure the free memory before any rank loads weights
            self._load(progress)
            self._sampler = Sampler(
                ranks,
                self.device,
                select_sampling(self.decoder.ops.name),
                vocab_size=self.config.vocab_size,
                first_vocab=self.decoder.shard.first_vocab,
                vocab=self.decoder.shard.vocab,
                vocab_real=self.decoder.shard.vocab_real,
            )
            self._await_build(building, progress)
            graphs = self._capture_layers(progress), self._capture_halves(progress)
            progress(Progress("build", detail="allocating the KV pool"))
            kv = RankKvCache(self.decoder, spec, self._predict(None), self.memory, self.max_model_len)
            kv.allocate(progress)
            self.max_model_len = kv.max_model_len
            self.steps = self._executor(self.decoder, kv.pools)
            if on_gpu:
                with steps_fit(spec, self.device):
                    self._warm_up(progress, *graphs)
                self.decoder.reset_expert_choices()
            kv.grow(progress)
            self.steps.kv, self.kv_blocks, self.max_model_len = kv.pools, kv.blocks, kv.max_model_len
            self._used_bytes = self._sum_over_ranks(self._measure(resident))
        if self.device.type == "cpu":
            self._stream = self._thread("engine-step")
        self._load_seconds = time.monotonic() - began
        progress(Progress("ready"))
        log.info("startup took %.1f s: %s", self._load_seconds, stages)

    # ── running steps ──────────────────────────────────────────────────────────────────────────────────

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Launch a step, which runs after all previously launched steps, and return without waiting. After a
        step has failed, every later step also raises an exception, because the device tables are invalid.
        """
        if self._stream is not None:
            return ThreadStep(self._stream.submit(self._run_on_thread, plan), self.ranks.check)
        with torch.inference_mode():
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            results = to_host(self._run(plan, began.record))
            ended.record()
        before, self._ended_event = self._ended_event, ended
        return StreamStep(plan, results, began, ended, before, self.ranks.check)

    def change_memory(self, asleep: bool) -> Future[MemoryChanged]:
        """On a separate thread, release the memory of the weights and the KV cache if `asleep` is true,
        otherwise restore it. See `engine.sleeping.MemoryRunner`."""
        if self._stream is not None:
            return self._stream.submit(self._change_memory, asleep)
        if self._memory_thread is None:
            self._memory_thread = self._thread("engine-memory")
        return self._memory_thread.submit(self._change_memory, asleep)

    def close(self) -> None:
        """Wait for the launched steps to finish, then leave the group of ranks."""
        if self._stream is not None:
            self._stream.shutdown()
        else:
            torch.cuda.synchronize(self.device)
            if self._memory_thread is not None:
                self._memory_thread.shutdown()
        # The graphs contain NCCL kernels, so they must be deleted before NCCL is shut down.
        self.steps.graphs = self.steps.prompt_graphs = None
        self.decoder.layer_graphs = self.decoder.halves_graphs = None
        self.ranks.close()

    def _thread(self, name: str) -> ThreadPoolExecutor:
        # This function must hold no reference to the runner (see `_sleep`).
        return ThreadPoolExecutor(1, name, partial(_enter_thread, self._threads, self.device))

    def _change_memory(self, asleep: bool) -> MemoryChanged:
        with torch.inference_mode():
            return self._sleep.change(asleep)

    def _run(self, plan: StepPlan, on_begin: Callable[[], object]) -> StepResults:
        if self._failed is not None:
            raise RuntimeError(
                f"step {plan.step} cannot run because an earlier step failed"
            ) from self._failed
        try:
            return self.steps.run(plan, on_begin)
        except BaseException as error:
            self._failed = error
            raise

    def _run_on_thread(self, plan: StepPlan) -> tuple[StepTokens, float]:
        began: list[float] = []
        with torch.inference_mode():
            tokens = read_results(plan, self._run(plan, lambda: began.append(time.perf_counter())))
        gap_us = 0.0 if self._ended_at is None else 1e6 * (began[0] - self._ended_at)
        self._ended_at = time.perf_counter()
        return tokens, gap_us

    # ── loading ─────────────────────────────────────────────────────────────────────────────────

    def _load(self, progress: ProgressCallback) -> None:
        if self.spec.load_format == "dummy":
            load_dummy(self.decoder, 0, progress)
        else:
            exchange = self.device.type == "cuda" and self.ranks.size > 1
            began = time.monotonic()
            read = load(
                self.decoder,
                self.spec.model_path,
                progress,
                exchange=exchange,
                share_reads=self.spec.share_reads,
            )
            seconds = time.monotonic() - began
            log.info(
                "read %.2f GB of weights in %.2f s: %.1f GB/s", read / 1e9, seconds, read / seconds / 1e9
            )

    def _executor(self, decoder: Decoder, kv: list[KvPool]) -> StepExecutor:
        """Return a step executor for a decoder and its KV pools, with new device tables."""
        blocks, slots = -(-self.max_model_len // BLOCK_TOKENS), self.spec.max_num_seqs
        padding = self._padding if decoder.ops.name == "cuda" else None
        tables = SlotTables(slots, blocks, self.config.vocab_size, self.device, padding)
        return StepExecutor(decoder, kv, tables, self._sampler)

    def _initial_max_model_len(self) -> int:
        """Return the configured maximum sequence length or, by default, the checkpoint's maximum, limited by
        the largest possible KV cache."""
        longest = self.config.resolve_length(self.spec.max_model_len)
        if self.spec.max_model_len is not None:
            return longest
        blocks = self.spec.kv_blocks
        if blocks is None:
            limit = memory.CPU_MAX_KV_BYTES // self.ranks.size
            if self.device.type == "cuda":
                _, limit = torch.cuda.mem_get_info(self.device)
            blocks = limit // kv_bytes_per_block(self.config, self.kv_cache_dtype, self.ranks.size)
        return min(longest, max(1, blocks) * BLOCK_TOKENS)

    def _start_build(self) -> KernelBuild:
        """On rank 0, start compiling the kernels, which are the same on all ranks. Raises UnsupportedError if
        they do not support the model."""
        served = ReplicaModel(
            config=self.config,
            dtype=self.dtype,
            fp8=self.weights != self.dtype,
            fp8_blocks=self.weights == FP8_BLOCKS,
            kv_fp8=self.kv_cache_dtype == FP8,
            tensor_parallel_size=self.ranks.size,
            max_num_seqs=self.spec.max_num_seqs,
            max_num_batched_tokens=self.spec.max_num_batched_tokens,
        )
        check_kernels(served, self.device)
        return start_build(served, self.device) if self.ranks.rank == 0 else KernelBuild()

    def _await_build(self, building: KernelBuild, progress: ProgressCallback) -> None:
        if building.running:
            progress(Progress("build", detail="compiling kernels"))
        building.wait()
        if self.device.type == "cuda":
            self._barrier()

    def _barrier(self) -> None:
        """Wait until all ranks have called this method."""
        self.ranks.all_gather_stack(torch.zeros(1, device=self.device))

    def _warm_up(
        self, progress: ProgressCallback, layers: LayerGraphs | None, halves: HalvesGraphs | None
    ) -> None:
        """Load every kernel that is launched while serving, capture the graphs, and reserve the memory that
        the largest steps need, so that no request has to wait for these. `layers` and `halves` are the graphs
        captured for longer passes."""
        reserve_pinned(_BYTES_PER_PROMPT_TOKEN * self.spec.max_num_batched_tokens)
        decoder, kernels = self.decoder, self.decoder.ops.name == "cuda"
        if kernels:
            self._capture_graphs(progress)
            # While a graph is being captured, no other graph can be replayed.
            decoder.layer_graphs, decoder.halves_graphs = layers, halves
        # A few layers launch every kernel. They also need as much memory as all layers, because a pass frees
        # each layer's memory before running the next layer.
        scratch = decoder.allocate_kv(1)
        few = decoder.representative(scratch)
        progress(Progress("warm up", detail="running the largest steps"))
        run_largest_steps(self._executor(*few), self.max_model_len, self.spec)
        if kernels:
            progress(Progress("warm up", detail="running steps of every size"))
            # Captured layers are replayed once, because a graph's first replay takes longer than later ones.
            captured = layers is not None or halves is not None
            apart = self._executor(decoder, scratch) if captured else self._executor(*few)
            warm_up(self.steps, apart, self.max_model_len, self._padding, to_host, progress)
        torch.cuda.synchronize(self.device)

    def _capture_graphs(self, progress: ProgressCallback) -> None:
        """Capture decode steps and short prompt passes as CUDA graphs."""
        # Imported here because these modules load Triton, which is not needed on a CPU.
        from engine.graphs import DecodeGraphs
        from engine.prompt_graphs import PromptGraphs

        steps, spec = self.steps, self.spec
        graphs = DecodeGraphs(steps.decoder, steps.kv, steps.tables, steps.sampler, spec.max_num_seqs)
        graphs.capture(progress)
        prompts = PromptGraphs(steps.decoder, steps.kv, steps.tables, spec.max_num_batched_tokens)
        prompts.capture(progress)
        torch.cuda.empty_cache()  # frees the memory of the uncaptured passes that ran before each capture
        steps.graphs, steps.prompt_graphs = graphs, prompts

    def _capture_layers(self, progress: ProgressCallback) -> LayerGraphs | None:
        """Capture the layers of those passes that the host takes longer to launch than the GPUs take to
        run."""
        if not self._captured_sizes or self.decoder.ops.name != "cuda":
            return None
        # Imported here because this module loads Triton, which is not needed on a CPU.
        from engine.layer_graphs import LayerGraphs

        graphs = LayerGraphs(self.decoder, self._captured_sizes)
        graphs.capture(progress)
        return graphs

    def _capture_halves(self, progress: ProgressCallback) -> HalvesGraphs | None:
        """Capture the graphs for passes that fill a token budget, if such passes run in two halves."""
        spec, decoder = self.spec, self.decoder
        full = spec.max_num_batched_tokens
        mixed = spec.max_mixed_tokens or default_mixed_tokens(spec.max_num_seqs, full)
        sizes = {size_for(size, self._padding.tokens) for size in (mixed, full)}
        sizes = {size for size in sizes if self.ranks.overlap(size) is not None}
        overlap = self.ranks.overlap(max(sizes, default=0))
        if overlap is None or not self._captured_sizes:
            return None
        # Imported here because these modules load Triton, which is not needed on a CPU.
        from engine.halves_graphs import HalvesGraphs
        from engine.peer_overlap import PeerOverlap

        if not isinstance(overlap, PeerOverlap):
            return None
        graphs = HalvesGraphs(decoder, overlap, sorted(sizes))
        graphs.capture(progress)
        return graphs

    def _predict(self, blocks: int | None) -> Sizing:
        return predict(
            self.config,
            dtype=self.dtype,
            weights=self.weights,
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.ranks.size,
            max_num_seqs=self.spec.max_num_seqs,
            max_num_batched_tokens=self.spec.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            blocks=blocks,
            on_gpu=self.device.type == "cuda",
        )

    def _measure(self, resident_before: int) -> int:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        # Add the KV pool's size. Its pages become resident only when first written, so the resident memory
        # does not include them yet.
        pool = self.kv_blocks * self._predict(None).kv_bytes_per_block
        return max(0, memory.resident_bytes() - resident_before) + pool

    def _sum_over_ranks(self, value: int) -> int:
        return _totals(self.ranks, self.device, [value])[0]

    def info(self) -> ReplicaInfo:
        """Return the properties of the loaded replica. Byte counts are sums over all ranks."""
        size = self.ranks.size
        predicted = self._predict(self.kv_blocks)
        devices = [device_name(self.device.type, rank) for rank in range(size)]
        least = min_times(self.config, devices[0], self.weights, size)
        return ReplicaInfo(
            replica=self.spec.replica,
            model_type=self.config.model_type,
            parameters=parameters(self.config),
            weight_bytes=predicted.weight_bytes * size,
            kv_bytes=predicted.kv_bytes * size,
            kv_blocks=self.kv_blocks,
            max_num_seqs=self.spec.max_num_seqs,
            max_num_batched_tokens=self.spec.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            dtype=self.dtype,
            weights=self.weights,
            kv_cache_dtype=self.kv_cache_dtype,
            backend=self.device.type,
            devices=devices,
            tensor_parallel_size=size,
            collectives=self.ranks.collectives,
            load_seconds=self._load_seconds,
            predicted_bytes=predicted.total_bytes * size,
            used_bytes=self._used_bytes,
            min_step_s=least.step_s,
            min_prompt_token_s=least.prompt_token_s,
        )


def _enter_thread(threads: int, device: torch.device) -> None:
    # Set OpenMP's thread count and CUDA's current device on this thread, because each thread has its own.
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _totals(ranks: Ranks, device: torch.device, numbers: Sequence[int]) -> list[int]:
    """Sum each number over all ranks. All ranks must call this function at the same time."""
    totals: list[int] = ranks.all_gather_stack(torch.tensor(numbers, device=device)).sum(0).tolist()
    return totals


def _dtype_name(requested: DType, config: ModelConfig, device: torch.device) -> ModelDType:
    if requested == "auto":
        return "float32" if device.type == "cpu" else config.dtype
    return requested


def _threads(spec: ReplicaSpec, ranks: int) -> int:
    return spec.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
