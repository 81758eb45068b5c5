"""What executes plans on one rank: the decoder, its KV pool, the rows' tables and the sampler.

Steps (`engine.steps`) run strictly in the order of their launch, on one stream: the current CUDA stream, or
one worker thread on a CPU, so that the step loop's own work (reading, planning, sending) goes on beside them.
"""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from engine import memory
from engine.batch import Padding, RowTables
from engine.config import DTYPE_BYTES, ModelConfig, UnfitError
from engine.device import device_name, select_device
from engine.families import read_config
from engine.kernel_build import KernelBuild, check_kernels, start_build
from engine.launched import Launched, OnStream, OnThread, StepResults, read, to_host
from engine.messages import BLOCK_TOKENS, ReplicaInfo, ReplicaSpec, StepPlan, StepTokens
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.model.loader import load, load_dummy
from engine.parallel import Ranks
from engine.profiling import profile_cuda, steps_fit
from engine.sampler import Sampler
from engine.served_model import ServedModel
from engine.sizing import (
    EXPANSION_BLOCKS,
    FP8,
    Sizing,
    kv_bytes_per_block,
    parameters,
    predict,
    product_ladder,
)
from engine.steps import Steps
from engine.transfer import reserve
from engine.warmup import warm_up
from kernels import KvPool, select_backend, select_sampling

_NUMBERS_OF_A_TOKEN = 4
"""Of 8 bytes, that a step sends for each token of its prompts."""

Progress = Callable[[str, float], None]
"""Called with what is being done and how far it is, 0 to 1."""


class Runner:
    """One rank of a replica, loaded and ready.

    `ranks` must have met already (and, with NCCL, `select_device` must have been called before that).
    `progress` is told what the build is doing. Raises CheckpointError for files that cannot be used,
    UnfitError for a split or length that the model does not allow, for a model that a GPU's kernels cannot
    serve and for meaningless fields of `spec`, DeviceError for a device that is not there, WeightsTooLarge
    and StepsTooLarge where these do not fit it, PoolTooSmall where a sequence of `spec.max_model_len` does
    not, PoolTooLarge where `spec.kv_blocks` cannot be had.
    """

    def __init__(self, spec: ReplicaSpec, ranks: Ranks, progress: Progress) -> None:
        began = time.monotonic()
        _check(spec)
        self.spec = spec
        self.ranks = ranks
        self.device = select_device(spec.device, ranks.rank, ranks.size)
        if spec.device == "auto" and self.device.type == "cpu":
            progress("no GPU was found: using the CPU", 0.0)
        self._threads = _threads(spec, ranks.size)
        torch.set_num_threads(self._threads)
        resident = memory.resident_bytes()
        self.config = read_config(spec.model_path)
        self.dtype = _dtype_name(spec.dtype, self.config, self.device)
        self.weights = FP8 if spec.weights == FP8 or self.config.fp8 else self.dtype
        self.kv_dtype = FP8 if spec.kv_dtype == FP8 else self.dtype
        self.max_model_len = self._longest()
        self._padding = Padding(product_ladder(spec.step_tokens), product_ladder(spec.max_rows))
        self._failed: BaseException | None = None
        self._ended_at: float | None = None
        self._ended_event: torch.cuda.Event | None = None
        self._stream: ThreadPoolExecutor | None = None
        building = self._start_build()
        with torch.inference_mode():
            self.decoder = Decoder(
                self.config,
                ranks,
                select_backend(self.device.type, TORCH_DTYPES[self.dtype], EXPANSION_BLOCKS),
                TORCH_DTYPES[self.dtype],
                self.device,
                max_model_len=self.max_model_len,
                fp8=self.weights == FP8,
                kv_fp8=self.kv_dtype == FP8,
            )
            self._meet()  # nobody fills memory before every rank has asked what there is
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
            progress("sizing the KV pool", 0.0)
            self.kv_blocks = self._size_pool(progress)
            self.steps = self._steps(self._allocate_kv(self.kv_blocks))
            if self.decoder.ops.name == "cuda":
                with steps_fit(spec, self.device):
                    self._warm_up(progress)
            self._used_bytes = self._sum_over_ranks(self._measure(resident))
        if self.device.type == "cpu":
            self._stream = ThreadPoolExecutor(1, "engine-step", self._enter_thread)
        self._load_seconds = time.monotonic() - began
        progress("ready", 1.0)

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def launch(self, plan: StepPlan) -> Launched:
        """Start the step that `plan` describes, after all launched before it, without waiting for any.

        After a step has failed, every later one raises too: the tables are void.
        """
        if self._stream is not None:
            return OnThread(self._stream.submit(self._run_on_thread, plan))
        with torch.inference_mode():
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            results = to_host(self._run(plan, began.record))
            ended.record()
        before, self._ended_event = self._ended_event, ended
        return OnStream(plan, results, began, ended, before)

    def close(self) -> None:
        """Wait for what was launched and leave the group."""
        if self._stream is not None:
            self._stream.shutdown()
        self.ranks.close()

    def _enter_thread(self) -> None:
        # OpenMP keeps the number of threads per calling thread.
        torch.set_num_threads(self._threads)

    def _run(self, plan: StepPlan, begins: Callable[[], object]) -> StepResults:
        if self._failed is not None:
            raise RuntimeError(f"step {plan.step} cannot run: an earlier one failed") from self._failed
        try:
            return self.steps.run(plan, begins)
        except BaseException as error:
            self._failed = error
            raise

    def _run_on_thread(self, plan: StepPlan) -> tuple[StepTokens, float]:
        began: list[float] = []
        with torch.inference_mode():
            tokens = read(plan, self._run(plan, lambda: began.append(time.perf_counter())))
        gap_us = 0.0 if self._ended_at is None else 1e6 * (began[0] - self._ended_at)
        self._ended_at = time.perf_counter()
        return tokens, gap_us

    # ── building ─────────────────────────────────────────────────────────────────────────────────

    def _load(self, progress: Progress) -> None:
        if self.spec.load_format == "dummy":
            progress("making random weights", 0.0)
            load_dummy(self.decoder, self.spec.seed)
        elif self.spec.load_format == "safetensors":
            load(self.decoder, self.spec.model_path, progress)
        else:
            raise UnfitError(f'load_format is {self.spec.load_format!r}: use "safetensors" or "dummy"')

    def _steps(self, kv: list[KvPool]) -> Steps:
        """With rows of their own, over a pool."""
        blocks, rows = -(-self.max_model_len // BLOCK_TOKENS), self.spec.max_rows
        padding = self._padding if self.decoder.ops.name == "cuda" else None
        tables = RowTables(rows, blocks, self.config.vocab_size, self.device, padding)
        return Steps(self.decoder, kv, tables, self._sampler)

    def _longest(self) -> int:
        """The longest sequence to prepare for: what was asked for, or the checkpoint's as far as KV could
        ever hold it. Some allow millions of tokens, and tables and working memory grow with the length."""
        longest = self.config.resolve_length(self.spec.max_model_len)
        if self.spec.max_model_len is not None:
            return longest
        blocks = self.spec.kv_blocks
        if blocks is None:
            most = memory.CPU_MOST_KV_BYTES // self.ranks.size
            if self.device.type == "cuda":
                _, most = torch.cuda.mem_get_info(self.device)
            blocks = most // kv_bytes_per_block(self.config, self.kv_dtype, self.ranks.size)
        return min(longest, max(1, blocks) * BLOCK_TOKENS)

    def _size_pool(self, progress: Progress) -> int:
        """Blocks, equal on every rank. Where nobody asked for a length and the checkpoint's does not fit, the
        longest sequence becomes what fits, and `progress` says so. Raises PoolTooSmall."""
        per_block = self._predict(None).kv_bytes_per_block
        given = self.spec.kv_blocks is not None
        # On a GPU in any case: the largest steps are run for it, and what they launch is loaded thereby.
        fitting = self._blocks_that_fit(per_block)
        blocks = self.spec.kv_blocks if self.spec.kv_blocks is not None else fitting
        allowed = self.config.context_length
        if self.spec.max_model_len is None and 0 < blocks * BLOCK_TOKENS < allowed:
            self.max_model_len = min(blocks * BLOCK_TOKENS, self.max_model_len)
            progress(
                f"memory for KV limits sequences to {self.max_model_len} tokens "
                f"(the checkpoint allows {allowed})",
                0.0,
            )
        return memory.check_blocks(blocks, self.max_model_len, per_block, given=given)

    def _blocks_that_fit(self, per_block: int) -> int:
        if self.device.type == "cuda":
            budget = profile_cuda(self._steps(self.decoder.allocate_kv(1)), self.spec)
        else:
            working = self._predict(None).activation_bytes
            share = int(memory.available_host_bytes() * self.spec.memory_fraction) // self.ranks.size
            budget = min(share - working, memory.CPU_MOST_KV_BYTES // self.ranks.size)
        mine = torch.tensor([budget // per_block], device=self.device)
        return int(self.ranks.all_gather_stack(mine).min())

    def _allocate_kv(self, blocks: int) -> list[KvPool]:
        """Raises PoolTooLarge where there is no memory for them."""
        per_block = self._predict(None).kv_bytes_per_block
        if self.device.type != "cpu":
            free, _ = torch.cuda.mem_get_info(self.device)
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            try:
                return self.decoder.allocate_kv(blocks)
            except torch.OutOfMemoryError as error:
                raise memory.too_large(blocks, per_block, 1, free + cached) from error
        # Asked beforehand: the kernel promises more pages than there are, and kills who uses them.
        available = memory.available_host_bytes()
        if blocks * per_block * self.ranks.size > available:
            raise memory.too_large(blocks, per_block, self.ranks.size, available)

        # The kernel's zero pages: a pool costs no start-up time, and no memory before its blocks are used.
        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            size = math.prod(shape) * dtype.itemsize
            try:
                pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except OSError as error:  # a limit of this process (ulimit -v), or strict accounting
                raise memory.PoolTooLarge(
                    f"kv_blocks is {blocks}: this process may not have the {size} bytes of a layer's keys "
                    f"({error.strerror}): raise its limits (ulimit -v), or lower kv_blocks"
                ) from error
            return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)

        return self.decoder.allocate_kv(blocks, zeros)

    def _start_build(self) -> KernelBuild:
        """Start to compile kernels, on the first rank, which compiles those of all ranks. Raises UnfitError
        if the kernels cannot serve the model."""
        served = ServedModel(
            config=self.config,
            dtype=self.dtype,
            fp8=self.weights == FP8,
            kv_fp8=self.kv_dtype == FP8,
            tensor_parallel_size=self.ranks.size,
            max_num_seqs=self.spec.max_rows,
            max_num_batched_tokens=self.spec.step_tokens,
        )
        check_kernels(served, self.device)
        return start_build(served, self.device) if self.ranks.rank == 0 else KernelBuild()

    def _await_build(self, building: KernelBuild, progress: Progress) -> None:
        if building.running:
            progress("compiling kernels", 0.0)
        building.wait()
        if self.device.type == "cuda":
            self._meet()

    def _meet(self) -> None:
        """Nobody goes on before all ranks are here."""
        self.ranks.all_gather_stack(torch.zeros(1, device=self.device))

    def _warm_up(self, progress: Progress) -> None:
        """Whatever serving launches is loaded, or captured, before anybody asks for it, and the memory that
        it sends with is there."""
        reserve(_NUMBERS_OF_A_TOKEN * self.spec.step_tokens * 8)
        if self.ranks.size == 1:
            self._capture_graphs(progress)
        apart = self._steps(self.decoder.allocate_kv(1))
        warm_up(self.steps, apart, self.max_model_len, self._padding, to_host)

    def _capture_graphs(self, progress: Progress) -> None:
        """Of steps that only decode, and of short passes of prompts."""
        # They load Triton, which a CPU can do without.
        from engine.graphs import DecodeGraphs
        from engine.prompt_graphs import PromptGraphs

        steps, spec = self.steps, self.spec
        graphs = DecodeGraphs(steps.decoder, steps.kv, steps.tables, steps.sampler, spec.max_rows)
        graphs.capture(progress)
        prompts = PromptGraphs(steps.decoder, steps.kv, steps.tables, spec.step_tokens)
        prompts.capture()
        torch.cuda.empty_cache()  # what the passes before each capture worked with
        steps.graphs, steps.prompt_graphs = graphs, prompts

    def _predict(self, blocks: int | None) -> Sizing:
        return predict(
            self.config,
            dtype=self.dtype,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            tensor_parallel_size=self.ranks.size,
            max_rows=self.spec.max_rows,
            step_tokens=self.spec.step_tokens,
            max_model_len=self.max_model_len,
            blocks=blocks,
            on_gpu=self.device.type == "cuda",
        )

    def _measure(self, resident_before: int) -> int:
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            return total - free
        # Pages of the zeroed pool become resident with their first use.
        pool = self.kv_blocks * self._predict(None).kv_bytes_per_block
        return max(0, memory.resident_bytes() - resident_before) + pool

    def _sum_over_ranks(self, value: int) -> int:
        return int(self.ranks.all_gather_stack(torch.tensor([value], device=self.device)).sum())

    def info(self) -> ReplicaInfo:
        """What the replica turned out to be. Bytes are sums over its ranks."""
        size = self.ranks.size
        predicted = self._predict(self.kv_blocks)
        return ReplicaInfo(
            replica=self.spec.replica,
            model_type=self.config.model_type,
            parameters=parameters(self.config),
            weight_bytes=predicted.weight_bytes * size,
            kv_bytes=predicted.kv_bytes * size,
            kv_blocks=self.kv_blocks,
            block_tokens=BLOCK_TOKENS,
            max_rows=self.spec.max_rows,
            step_tokens=self.spec.step_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.config.vocab_size,
            dtype=self.dtype,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            backend=self.device.type,
            devices=[device_name(self.device.type, rank) for rank in range(size)],
            tensor_parallel_size=size,
            load_seconds=self._load_seconds,
            predicted_bytes=predicted.total_bytes * size,
            used_bytes=self._used_bytes,
            torch_version=str(torch.__version__),
        )


def _dtype_name(wanted: str, config: ModelConfig, device: torch.device) -> str:
    if wanted == "auto":
        return "float32" if device.type == "cpu" else config.dtype
    if wanted not in DTYPE_BYTES:
        raise UnfitError(f"dtype is {wanted!r}: use auto, {', '.join(DTYPE_BYTES)}")
    return wanted


def _check(spec: ReplicaSpec) -> None:
    """Refuses before anything is loaded what no device could run."""
    if spec.max_rows < 1:
        raise UnfitError(f"max_rows is {spec.max_rows}: give at least 1")
    for name, value in (("weights", spec.weights), ("kv_dtype", spec.kv_dtype)):
        if value not in ("auto", FP8):
            raise UnfitError(f'{name} is {value!r}: use "auto" or "{FP8}"')
    if spec.step_tokens < spec.max_rows:
        raise UnfitError(
            f"step_tokens is {spec.step_tokens}, but {spec.max_rows} rows decode one token each in a step: "
            "raise step_tokens or lower max_rows"
        )
    if spec.mixed_tokens is not None and not spec.max_rows <= spec.mixed_tokens <= spec.step_tokens:
        raise UnfitError(
            f"mixed_tokens is {spec.mixed_tokens}: give at least max_rows, {spec.max_rows}, and at most "
            f"step_tokens, {spec.step_tokens}, or leave it out"
        )
    if not 0.0 < spec.memory_fraction <= 1.0:
        raise UnfitError(f"memory_fraction is {spec.memory_fraction}: give more than 0 and at most 1")
    if spec.threads is not None and spec.threads < 1:
        raise UnfitError(f"threads is {spec.threads}: give at least 1, or leave it out")


def _threads(spec: ReplicaSpec, ranks: int) -> int:
    return spec.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
