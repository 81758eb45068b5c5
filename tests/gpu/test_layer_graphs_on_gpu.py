"""Tests that the results of captured layers and captured halves are bitwise equal to those of eager passes.
One GPU suffices, because a group of one rank runs the same graphs without messages to other ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.bench.shapes import write_config
from engine.device_tables import SlotTables
from engine.families import read_config
from engine.halves_graphs import HalvesGraphs
from engine.layer_graphs import LayerGraphs
from engine.messages import SamplingParams
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.parallel import _Single
from engine.peer_memory import ITEMS
from engine.peer_overlap import PeerOverlap, make_overlap
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.progress import no_progress
from engine.sizing import EXPANSION_BLOCKS, overlap_split
from kernels import select_backend
from kernels.triton.peer_arena import EMPTY_WORD, PROGRAMS, Arena, arena_words, stop_words

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

FULL, SHORT, LAYERS = 4096, 512, 12


class LoneRank(_Single):
    """A group of one rank, which computes passes of FULL tokens in halves."""

    made: PeerOverlap | None = None

    def overlap(self, tokens: int) -> PeerOverlap | None:
        if self.made is None or tokens < FULL:
            return None
        self.made.split = overlap_split(tokens)
        return self.made


def lone_overlap(hidden: int, device: torch.device) -> PeerOverlap:
    memory = torch.full((arena_words(1, ITEMS),), EMPTY_WORD, dtype=torch.int32, device=device)
    host = torch.zeros(1, dtype=torch.int32).pin_memory()
    stop = stop_words(host.data_ptr(), device)
    arena = Arena(
        rank=0,
        world=1,
        addresses=torch.tensor([memory.data_ptr()], dtype=torch.int64, device=device),
        calls=torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
        stop_address=stop.data_ptr(),
        items=ITEMS,
    )
    held.append((memory, host, stop))
    return make_overlap(
        arena,
        overlap_split(FULL),
        hidden,
        torch.bfloat16,
        device,
        lambda shape, dtype: [torch.empty(shape, dtype=dtype, device=device)],
    )


held: list[tuple[torch.Tensor, ...]] = []
"""Tensors that must stay allocated, because kernels access their memory by address."""


def prompts(lengths: list[int]) -> StepPlan:
    blocks: list[tuple[int, int, int]] = []
    chunks, setups = [], []
    for slot, length in enumerate(lengths):
        used = -(-length // 64) + 1
        blocks += [(slot, index, len(blocks) + index) for index in range(used)]
        setups.append(SlotSetup(slot, SamplingParams(max_tokens=1), 0, length, []))
        chunks.append(Chunk(slot, 0, [(7 * place + slot) % 900 + 3 for place in range(length)], [slot]))
    return StepPlan(0, setups, blocks, [], [], chunks)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("shape", ["llama-3.1-8b", "qwen3-30b-a3b"])
@torch.inference_mode()
def test_captured_passes_compute_the_bits_of_eager_passes(
    shape: str, fp8: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    config = read_config(write_config(shape, tmp_path)).with_layers(list(range(LAYERS)))
    ranks = LoneRank()
    decoder = Decoder(
        config,
        ranks,
        select_backend("cuda", torch.bfloat16, EXPANSION_BLOCKS),
        torch.bfloat16,
        device,
        max_model_len=FULL + 64,
        fp8=fp8,
        kv_fp8=fp8,
    )
    load_dummy(decoder, 0)
    ranks.made = overlap = lone_overlap(config.hidden_size, device)
    kv = decoder.allocate_kv(128)
    tables = SlotTables(8, 72, config.vocab_size, device)
    halves = HalvesGraphs(decoder, overlap, [FULL])
    layers = LayerGraphs(decoder, [SHORT])
    with_decodes = prompts([2, 3, 500, 10])
    with_decodes = replace(with_decodes, decodes=[0, 1], chunks=with_decodes.chunks[2:])
    plans = [prompts([FULL]), prompts([2000, 500, 1500, 96]), prompts([SHORT]), with_decodes]

    def run(plan: StepPlan) -> tuple[torch.Tensor, float]:
        batch = tables.step_batch(plan)
        torch.cuda.synchronize()
        began = time.perf_counter()
        hidden = decoder.forward(batch.forward, kv)
        host = time.perf_counter() - began
        return hidden.float().cpu(), 1e3 * host

    def timed(call: Callable[[], object]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    expected, eager_ms = [], []
    for plan in plans:
        tables.apply(plan)
        expected.append([run(plan)[0] for _ in range(3)][-1])
        eager_ms.append(statistics.median(run(plan)[1] for _ in range(5)))
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    capture_ms, used = [], []
    for graphs in (halves, layers):
        capture_ms.append(timed(partial(graphs.capture, no_progress)))
        torch.cuda.empty_cache()
        used.append((free - torch.cuda.mem_get_info()[0]) / 2**20)
    decoder.halves_graphs, decoder.layer_graphs = halves, layers
    captured_ms = []
    for plan, wanted in zip(plans, expected, strict=True):
        tables.apply(plan)
        for _ in range(4):
            assert torch.equal(run(plan)[0], wanted)
        captured_ms.append(statistics.median(run(plan)[1] for _ in range(5)))
    with capsys.disabled():
        for name, numbers in (
            ("host, eager, ms", eager_ms),
            ("host, captured, ms", captured_ms),
            ("capture of halves and layers, ms", capture_ms),
            ("memory of halves and layers together, MiB", used),
        ):
            print(f"\n{LAYERS} layers: {name}: " + ", ".join(f"{number:.2f}" for number in numbers), end="")
        print()
