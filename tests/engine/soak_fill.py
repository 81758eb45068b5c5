"""A wave of long sequences that uses every block of the pool, in all slots, with every kind of sampling.

Every slot has a prompt, and all prompts together nearly fill the pool. All sequences then decode until no
block is left and sequences are preempted. After some more steps, the remaining sequences are cancelled. The
test shows that the engine can use every block of the pool without running out of memory, and how accurately
`engine.sizing` predicts the memory use.
"""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from engine.generate import LocalEngine
from engine.memory import resident_bytes
from engine.messages import BLOCK_TOKENS, SamplingParams, Submit, pack_tokens
from tests.engine.output_checker import OutputChecker

_STEPS_WHEN_FULL = 200
_SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.8, "top_k": 50, "repetition_penalty": 1.1, "logprobs": 20},
]


def fill(engine: LocalEngine, seed: int = 0) -> dict[str, Any]:
    """Fill the pool once and return the statistics, with memory in bytes. `wrong` is the description of a
    failure, or None."""
    info, draw = engine.info, random.Random(seed)
    checker = OutputChecker(info.max_model_len, info.vocab_size, None)
    before = _used_bytes(engine)
    for submit in _submits(engine, draw):
        checker.submitted("fill", submit, "")
        engine.scheduler.add("fill", submit)
    began = time.monotonic()
    most_blocks = most_bytes = most_running = full_steps = 0
    while engine.core.has_work:
        checker.take(engine.core.step())
        checker.done.clear()
        gauges = engine.core.gauges()
        most_running = max(most_running, gauges.running)
        full_steps += most_blocks == info.kv_blocks
        if gauges.blocks_used > most_blocks or gauges.step % 16 == 0:
            most_blocks = max(most_blocks, gauges.blocks_used)
            most_bytes = max(most_bytes, _used_bytes(engine))
        if full_steps == _STEPS_WHEN_FULL:
            for handle in list(checker.open):
                checker.cancelled(handle, None)
                engine.scheduler.cancel("fill", handle)
    engine.scheduler.check()
    wrong = None
    if most_blocks != info.kv_blocks:
        wrong = f"at most {most_blocks} of {info.kv_blocks} blocks were in use"
    elif most_running < 0.9 * info.max_num_seqs:
        wrong = f"at most {most_running} of {info.max_num_seqs} slots were in use"
    elif not gauges.preemptions:
        wrong = "no sequence was preempted: the pool did not run out of blocks"
    elif checker.open:
        wrong = f"{len(checker.open)} sequences never ended"
    return {
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
        "steps": gauges.step,
        "rows": info.max_num_seqs,
        "most_running": most_running,
        "blocks": info.kv_blocks,
        "most_blocks": most_blocks,
        "preemptions": gauges.preemptions,
        "ended": dict(checker.counts),
        **_memory(engine, before, most_bytes),
    }


def _submits(engine: LocalEngine, draw: random.Random) -> list[Submit]:
    """Return one submission per slot. The first slots start to decode while the last prompts are still being
    computed, so the prompts must leave blocks free for these decodes. Later, the sequences together need more
    blocks than the pool has."""
    info, scheduler = engine.info, engine.scheduler
    rows = info.max_num_seqs
    # On average, half of a sequence's last block is unused. The blocks of the watermark stay free for
    # decodes.
    tokens = ((info.kv_blocks - scheduler.watermark) / rows - 0.5) * BLOCK_TOKENS
    of_prompts = max(1, scheduler.max_mixed_tokens - rows // 2)
    length = int(tokens / (1 + rows / (2 * of_prompts)))
    steps = rows * length // of_prompts
    most = steps + 4 * BLOCK_TOKENS
    if length < 1 or length + most > info.max_model_len:
        raise ValueError(
            f"to fill {info.kv_blocks} blocks, each of {rows} slots needs {length} prompt tokens and {most} "
            f"output tokens; max_model_len is {info.max_model_len}: change max_num_seqs, kv_blocks or "
            "max_model_len"
        )
    submits = []
    for row in range(rows):
        prompt = [draw.randrange(3, info.vocab_size) for _ in range(length)]
        sampling = SamplingParams(max_tokens=most, ignore_eos=True, seed=row, **_SAMPLING[row % 4])
        name = f"fill-{row}"
        submits.append(
            Submit(
                handle=row, request_id=name, prompt=pack_tokens(prompt), sampling=sampling, cache_salt=name
            )
        )
    return submits


def _memory(engine: LocalEngine, before: int, most: int) -> dict[str, Any]:
    """Return the predicted memory use, the memory use after startup and the maximum memory use. On a GPU,
    also return the sizes of the weights and of the KV cache."""
    info = engine.info
    stats: dict[str, Any] = {
        "weight_bytes": info.weight_bytes,
        "kv_bytes": info.kv_bytes,
        "predicted_bytes": info.predicted_bytes,
        "measured_bytes": info.used_bytes,
        "before_bytes": before,
        "most_bytes": most,
        "measured_over_predicted": round(info.used_bytes / info.predicted_bytes, 4),
    }
    if engine.runner.device.type == "cuda":
        _, total = torch.cuda.mem_get_info()
        stats["device_bytes"] = total
        stats["weights_and_kv_share"] = round((info.weight_bytes + info.kv_bytes) / total, 4)
        stats["most_tensor_bytes"] = torch.cuda.max_memory_allocated()
        stats["most_over_predicted"] = round(most / info.predicted_bytes, 4)
    return stats


def _used_bytes(engine: LocalEngine) -> int:
    """Return the memory in use, in bytes: on a GPU that of the whole device, on a CPU that of this
    process."""
    if engine.runner.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        return int(total - free)
    return resident_bytes()
