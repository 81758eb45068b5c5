"""The process of one rank. It loads and runs checkpoints, and measures how fast the rank detects another
rank's death."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load, load_dummy
from engine.parallel import RankFailureError, Ranks, join
from engine.progress import no_progress
from kernels import Residual, select_backend

from .driver import Driver, teacher_forced

PROMPTS = [1, 64, 100]
CHUNK_SIZES = [7, 64, 50]
DECODES = 2


def loaded(
    folder: Path,
    ranks: Ranks,
    *,
    dummy: bool = False,
    exchange: bool = False,
    fp8: bool = False,
    kv_fp8: bool = False,
    whole_experts: bool = False,
) -> tuple[Decoder, list[torch.Tensor]]:
    """Return the loaded decoder and its weights. Every rank must call this function."""
    config = read_config(folder)
    if whole_experts:
        config = config.with_whole_experts()
    decoder = Decoder(
        config,
        ranks,
        select_backend("cpu"),
        torch.float32,
        torch.device("cpu"),
        fp8=fp8 or config.fp8,
        fp8_blocks=config.fp8_blocks,
        kv_fp8=kv_fp8,
    )
    shards = decoder.weight_shards()
    if dummy:
        load_dummy(decoder, seed=3)
    else:
        load(decoder, folder, no_progress, exchange=exchange)
    tensors = [tensor for shard in shards for tensor in (shard.target, shard.scales)]
    return decoder, [tensor for tensor in tensors if tensor is not None]


def logits_of(decoder: Decoder, tokens: list[int]) -> list[torch.Tensor]:
    """Return the logits of PROMPTS prompts that are taken from `tokens`, and of DECODES tokens that follow.
    Every rank must call this function."""
    return teacher_forced(Driver(decoder, blocks=8), tokens, PROMPTS, CHUNK_SIZES, DECODES)


def logits_of_all(folders: list[Path], ranks: Ranks, tokens: list[int]) -> dict[str, list[torch.Tensor]]:
    """Return the logits of every checkpoint, and of quantised variants of the first checkpoint. Every rank
    must call this function."""
    found = {}
    for folder in folders:
        decoder, weights = loaded(folder, ranks)
        found[folder.name] = logits_of(decoder, tokens)
        if ranks.size > 1:
            # The loader must load the same weights whether or not the ranks exchange columns.
            _, exchanged = loaded(folder, ranks, exchange=True)
            for one, other in zip(weights, exchanged, strict=True):
                assert torch.equal(one.float(), other.float()), folder
    mixture = next(folder for folder in folders if folder.name == "shared expert")
    variants: dict[str, tuple[Path, dict[str, bool]]] = {
        "dummy": (folders[0], {"dummy": True}),
        "FP8 KV": (folders[0], {"kv_fp8": True}),
        "FP8 weights and KV": (folders[0], {"fp8": True, "kv_fp8": True}),
        "FP8 experts": (mixture, {"fp8": True}),
        "whole experts, FP8": (mixture, {"fp8": True, "whole_experts": True}),
        "whole experts, dummy": (mixture, {"dummy": True, "whole_experts": True}),
    }
    for folder in folders:
        if read_config(folder).experts is not None:
            variants[f"whole experts, {folder.name}"] = folder, {"whole_experts": True, "exchange": True}
    for name, (folder, options) in variants.items():
        found[name] = logits_of(loaded(folder, ranks, **options)[0], tokens)
    return found


def _scores(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores and token ids of five rows. The first row has its best score on the last rank. The
    others have a tie, a NaN on the first rank, an infinity, and only non-finite scores."""
    first = torch.nan if rank == 0 else 1.0
    values = torch.tensor([float(rank), 5.0, first, torch.inf if rank == 1 else 0.0, -torch.inf])
    return values, torch.arange(5) + 10 * rank


def main(size: int, rank: int, rendezvous: str, folders: list[Path], tokens: list[int], result: Path) -> None:
    """Run one rank. Rank 0 writes the logits, the results of the collectives, and the time in which it
    detected the death of the last rank."""
    torch.set_num_threads(1)
    ranks = join(size, rank, rendezvous, "gloo", timeout_seconds=60)
    found = logits_of_all(folders, ranks, tokens)
    mine = torch.tensor([[rank, 10.0 + rank]])
    collectives = [
        ranks.all_reduce(mine.clone()),
        ranks.all_gather_last_dim(mine),
        ranks.all_gather_stack(mine),
        ranks.all_reduce(torch.ones(3, dtype=torch.bfloat16)).float(),
        ranks.add_sum(Residual(torch.full((1, 2), 0.5)), mine.clone(), torch.ones(2)).values,
        ranks.best(*_scores(rank)),
    ]
    if rank == size - 1:
        os._exit(0)
    started = time.monotonic()
    failure = ""
    try:
        while True:
            ranks.all_reduce(torch.ones(4))
    except RankFailureError as error:
        failure = str(error)
    seconds = time.monotonic() - started
    if rank == 0:
        torch.save(
            {"logits": found, "collectives": collectives, "failure": failure, "seconds": seconds}, result
        )
    os._exit(0)
