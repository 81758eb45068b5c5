"""Tests that two GPUs compute the same results as one GPU, in captured and in eager passes. The results of
both ranks must be bitwise equal, and a rank must stop waiting when the other is killed."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from engine.generate import LocalEngine
from engine.messages import BLOCK_TOKENS, ReplicaSpec, SamplingParams
from engine.parallel import RankFailureError
from engine.peer_ranks import PeerRanks
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.runner import ModelRunner
from engine.sizing import pass_sizes, size_for
from kernels.sampling import gumbel_noise, noise_base, noise_keys, token_hashes
from tests.demo_model.asking import DEMO
from tests.engine.rank_group import Member, RankEngine, results, start_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

SIZES = [size for size in (2, 4) if size <= max(2, torch.cuda.device_count())]
"""Rank counts to test."""
NEAR_TIE = 0.125
"""Maximum gap between the best score and the score of a token that was chosen with another number of GPUs.
The logits of these models have magnitudes below 8, where bfloat16 numbers are 1/32 apart. A different order
of summation changes a logit by a few such steps."""
DEMO_NEAR_TIE = 0.25
"""The same tolerance as `NEAR_TIE`, but for the demo model. It is `tests.demo_model.parity.NEAR_TIE`."""
ALLOWED = 0.03
"""Allowed relative difference between logits, as in `test_prompt_graphs_on_gpu`."""

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "vocab_size": 2044,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}
MIXTURE = SHAPE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}
"""A mixture-of-experts model in which every token chooses all experts. Otherwise, the order of summation
could change the choice between two experts with almost equal logits, and the result would then change by more
than the tolerances."""
PROMPTS = [[(7 * place + 13 * start) % 900 + 3 for place in range(5 + 30 * start)] for start in range(6)]
REQUESTS = [
    *(SamplingParams(max_tokens=60, ignore_eos=True) for _ in range(6)),
    *(SamplingParams(max_tokens=40, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(6)),
]
FILTERED = [
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, top_p=0.9, top_k=50, seed=seed)
    for seed in range(6)
]
"""Sampling parameters that need the full variant, which requires the logits to be gathered."""


def spec_of(folder: Path, kv_heads: int | None, **changes: Any) -> ReplicaSpec:
    """Return the configuration of a small random model, or of the demo model if kv_heads is None."""
    fields = {
        "replica": "test-0",
        "model_path": str(DEMO),
        "device": "cuda",
        "dtype": "bfloat16",
        "kv_blocks": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_model_len": 512,
    }
    if kv_heads is not None:
        (folder / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": kv_heads}))
        fields |= {"model_path": str(folder), "load_format": "dummy"}
    return ReplicaSpec(**(fields | changes))  # type: ignore[arg-type]


def tokens_of(made: LocalEngine) -> list[list[int]]:
    """Return the answers of three runs: REQUESTS in one batch, FILTERED in one batch, and one request
    alone."""
    found = made.generate([*PROMPTS, *PROMPTS], REQUESTS)
    found += made.generate(PROMPTS, FILTERED)
    found += made.generate(PROMPTS[:1], REQUESTS[0])
    return [samples[0].token_ids for samples in found]


# ── computation on every rank ────────────────────────────────────────────────────────────────────────


def plan_of(prompts: list[list[int]]) -> StepPlan:
    """Return a plan that computes whole prompts. Each prompt has a separate slot and separate blocks."""
    blocks, setups, chunks = [], [], []
    for slot, prompt in enumerate(prompts):
        used = -(-(len(prompt) + 1) // BLOCK_TOKENS)
        first = len(blocks)
        blocks += [(slot, index, first + index) for index in range(used)]
        setups.append(SlotSetup(slot, SamplingParams(max_tokens=1), 0, len(prompt), []))
        chunks.append(Chunk(slot, 0, prompt, [slot]))
    return StepPlan(0, setups, blocks, [], [], chunks)


def whole(runner: ModelRunner, logits: torch.Tensor) -> torch.Tensor:
    gathered = runner.ranks.all_gather_last_dim(logits)
    return gathered[:, : runner.config.vocab_size].float().cpu()


@torch.inference_mode()
def passes(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """Return the hidden states and logits of the last tokens of three prompts, and of one decode step after
    each prompt. Both the prompts and the decodes are computed eagerly and with captured graphs."""
    steps, plan = runner.steps, plan_of(PROMPTS[1:4])
    assert steps.graphs is not None and steps.prompt_graphs is not None
    steps.tables.apply(plan)
    assert steps.prompt_graphs.fits(plan)
    steps.prompt_graphs.stage(plan)
    found = {"prompts captured": whole(runner, steps.prompt_graphs.forward())}
    batch = steps.tables.step_batch(plan)
    hidden = steps.decoder.forward(batch.forward, steps.kv)
    found["hidden"] = hidden[:3].float().cpu()
    found["prompts eager"] = whole(runner, steps.decoder.logits(hidden)[:3])
    steps.run(plan)  # samples the input tokens for the decodes
    steps.graphs.set_slots([0, 1, 2])
    found["decodes captured"] = whole(runner, steps.graphs.forward())
    batch = steps.tables.step_batch(StepPlan(0, [], [], [], [0, 1, 2], []))
    hidden = steps.decoder.forward(batch.forward, steps.kv)
    found["decodes eager"] = whole(runner, steps.decoder.logits(hidden)[:3])
    return found


def answer_and_pass(member: Member, spec: ReplicaSpec) -> dict[str, Any]:
    runner = member.runner(spec)
    tokens = None
    if member.rank == 0:
        made = RankEngine(spec, runner, member.peers)
        tokens = tokens_of(made)
        made.release_peers()
    else:
        member.follow_rank_0(runner)
    return {"tokens": tokens, "passes": passes(runner)}


# ── comparison ───────────────────────────────────────────────────────────────────────────────────────


@torch.inference_mode()
def behind(runner: ModelRunner, sequence: list[int], token: int, params: SamplingParams) -> float:
    """Return the difference between the best score after `sequence` and the score of `token`."""
    plan = plan_of([sequence])
    runner.steps.tables.apply(plan)
    batch = runner.steps.tables.step_batch(plan)
    hidden = runner.decoder.forward(batch.forward, runner.steps.kv)
    scores = runner.decoder.logits(hidden)[0, : runner.config.vocab_size].float().cpu()
    if params.temperature > 0:
        base = torch.tensor([noise_base(params.seed or 0, 0)])
        keys = noise_keys(base, torch.tensor([len(sequence)]))
        hashes = token_hashes(0, len(scores), torch.device("cpu"))
        scores /= params.temperature
        kept = scores >= _lowest_kept(scores, params)
        scores += gumbel_noise(keys, hashes)[0]
        return float(scores[kept].max() - scores[token])
    return float(scores.max() - scores[token])


def _lowest_kept(scores: torch.Tensor, params: SamplingParams) -> float:
    """Return a score such that top-k and top-p keep every token with a higher score, even if all scores
    change by up to NEAR_TIE."""
    if not params.top_k:
        return -torch.inf
    best = scores.topk(params.top_k).values
    shares = best.softmax(0).cumsum(0)
    last = int((shares < params.top_p).sum())
    return min(float(best[0]), float(best[min(last, len(best) - 1)]) + NEAR_TIE)


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def same_best(found: torch.Tensor, expected: torch.Tensor, near_tie: float) -> torch.Tensor:
    """Return a mask of the rows in which both have the same best token. In the other rows, the scores of the
    two tokens must be almost equal."""
    token = found.argmax(1)
    gaps = expected.max(1).values - expected.gather(1, token[:, None])[:, 0]
    assert bool((gaps <= near_tie).all()), f"best scores differ by {gaps.tolist()}"
    agree = token == expected.argmax(1)
    assert bool(agree.any()), "every row is a near-tie"
    return agree


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [1, 2, 8, None], ids=["1-kv-head", "2-kv-heads", "8-kv-heads", "demo"])
def test_several_gpus_generate_the_tokens_of_one_up_to_near_ties(
    kv_heads: int | None, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tmp_path, kv_heads)
    compare_with_one_gpu(spec, {"tensor_parallel_size": size}, tmp_path, capsys)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("whole", [False, True], ids=["split", "whole"])
def test_several_gpus_with_both_layouts_of_experts_generate_the_tokens_of_one(
    whole: bool, size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = spec_of(tmp_path, 2)
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    changes = {"tensor_parallel_size": size, "expert_parallel": whole}
    compare_with_one_gpu(spec, changes, tmp_path, capsys)


def compare_with_one_gpu(
    spec: ReplicaSpec, changes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compare a replica on several GPUs, with `changes` to its settings, with a replica on one GPU: their
    answers, and the results of their passes."""
    size = changes["tensor_parallel_size"]
    on_several = structs.replace(spec, **changes)
    processes = start_ranks(size, tmp_path / "ranks", "cuda", answer_and_pass, on_several)
    # Let the ranks exit before the reference engine starts. Processes that share a GPU take turns, which
    # slows down ranks that wait for each other.
    first, *others = results(processes, tmp_path / "ranks")
    made = LocalEngine(spec)
    expected = tokens_of(made)
    expected_passes = passes(made.runner)

    allowed = DEMO_NEAR_TIE if spec.model_path == str(DEMO) else NEAR_TIE
    agree = same_best(first["passes"]["prompts captured"], expected_passes["prompts captured"], allowed)
    for name, logits in first["passes"].items():
        for other in others:
            assert torch.equal(logits, other["passes"][name]), f"ranks differ in {name}"
        # A decode's input is the best token of its prompt, so only equal inputs give equal logits.
        rows = agree if name.startswith("decodes") else slice(None)
        one_gpu = expected_passes[name][rows]
        assert apart(logits[rows], one_gpu) < ALLOWED, f"{size} GPUs and one GPU differ in {name}"
    for kind in ("prompts", "decodes"):
        assert apart(first["passes"][f"{kind} captured"], first["passes"][f"{kind} eager"]) < ALLOWED, kind

    prompts = [*PROMPTS, *PROMPTS, *PROMPTS, PROMPTS[0]]
    requests = [*REQUESTS, *FILTERED, REQUESTS[0]]
    gaps = []
    for prompt, params, found, wanted in zip(prompts, requests, first["tokens"], expected, strict=True):
        assert len(found) == len(wanted)
        place = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b), None)
        if place is not None:
            gaps.append(behind(made.runner, prompt + wanted[:place], found[place], params))
            assert gaps[-1] < allowed, f"token {place} with {params}: {found[place]}, not {wanted[place]}"
    made.close()
    with capsys.disabled():
        print(
            f"\n{len(gaps)} of {len(prompts)} answers differ, at gaps of at most {max(gaps, default=0):.4f}"
        )


# ── FP8 ──────────────────────────────────────────────────────────────────────────────────────────────


def fp8_passes(member: Member, spec: ReplicaSpec, quantised_rows: range) -> dict[str, torch.Tensor]:
    assert isinstance(member.ranks, PeerRanks)
    member.ranks.limits = replace(member.ranks.limits, quantised_rows=quantised_rows)
    return passes(member.runner(spec))


def test_fp8_decodes_with_fused_norms_compute_what_separate_norms_compute(tmp_path: Path) -> None:
    """Both cases use the same scales, so results may differ only where a number lies close to the boundary
    between two e4m3 values."""
    spec = spec_of(tmp_path, 2, tensor_parallel_size=2, quantization="fp8")
    fused, separate = (
        results(
            start_ranks(2, tmp_path / f"{len(rows)}", "cuda", fp8_passes, spec, rows),
            tmp_path / f"{len(rows)}",
        )
        for rows in (range(2, 65), range(0))
    )
    for name, logits in fused[0].items():
        assert torch.equal(logits, fused[1][name]), f"ranks differ in {name}"
        assert apart(logits, separate[0][name]) < ALLOWED, name


# ── long prompts ─────────────────────────────────────────────────────────────────────────────────────

LONG = [[(7 * place + 13 * start) % 900 + 3 for place in range(1900 + start)] for start in range(2)]
"""Prompts that are computed in one pass, in which the second prompt is split."""


@torch.inference_mode()
def long_passes(runner: ModelRunner) -> list[torch.Tensor]:
    """Return the hidden states of the last tokens of the prompts in LONG, from ten passes over the same
    blocks."""
    plan = plan_of(LONG)
    runner.steps.tables.apply(plan)
    found = []
    for _ in range(10):
        batch = runner.steps.tables.step_batch(plan)
        found.append(runner.decoder.forward(batch.forward, runner.steps.kv)[:2].float().cpu())
    return found


def halved_passes(member: Member, spec: ReplicaSpec) -> dict[str, Any]:
    runner = member.runner(spec)
    sizes = pass_sizes(runner.config, member.ranks.size, spec.max_num_batched_tokens)
    tokens = size_for(sum(map(len, LONG)), sizes)
    return {"halved": member.ranks.overlap(tokens) is not None, "hidden": long_passes(runner)}


@pytest.mark.parametrize("size", SIZES)
def test_passes_in_halves_compute_what_one_gpu_computes_with_equal_bits_each_time(
    size: int, tmp_path: Path
) -> None:
    changes = {"max_num_batched_tokens": 4096, "max_model_len": 4096}
    spec = spec_of(tmp_path, 2, **changes)
    config = SHAPE | {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    # Captured passes have up to 1,024 tokens and are not split.
    on_several = ReplicaSpec(**{**structs.asdict(spec), "tensor_parallel_size": size})
    processes = start_ranks(size, tmp_path / "ranks", "cuda", halved_passes, on_several, overlap_from=2048)
    found = results(processes, tmp_path / "ranks")
    made = LocalEngine(spec)
    expected = long_passes(made.runner)[0]
    made.close()
    first = found[0]["hidden"][0]
    for rank in found:
        assert rank["halved"]
        assert all(torch.equal(hidden, first) for hidden in rank["hidden"])
    assert apart(first, expected) < ALLOWED


# ── death of a rank ──────────────────────────────────────────────────────────────────────────────────


def generate_until_failure(member: Member, spec: ReplicaSpec) -> dict[str, Any]:
    runner = member.runner(spec)
    watch = member.watch()
    if member.rank > 0:
        member.follow_rank_0(runner)
        return {}
    made = RankEngine(spec, runner, member.peers)
    made.generate(PROMPTS, REQUESTS[:6])
    (member.folder / "generating").touch()
    try:
        while True:
            made.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    except RankFailureError as error:
        failed_at = time.monotonic()
        usable = int(torch.ones(1000, device="cuda").sum())
        watch.close()
        return {"error": str(error), "failed_at": failed_at, "usable": usable}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kv_heads", [2, None], ids=["peer-memory", "nccl"])
def test_the_death_of_a_rank_is_reported_within_a_second_and_leaves_the_gpu_usable(
    kv_heads: int | None, size: int, tmp_path: Path
) -> None:
    """The demo model's rows cannot be divided into the units that peer memory transfers, so the model's
    all-reduces use NCCL."""
    spec = spec_of(tmp_path, kv_heads, tensor_parallel_size=size)
    processes = start_ranks(size, tmp_path / "ranks", "cuda", generate_until_failure, spec)
    deadline = time.monotonic() + 180
    while not (tmp_path / "ranks" / "generating").exists():
        assert time.monotonic() < deadline and all(process.is_alive() for process in processes)
        time.sleep(0.05)
    time.sleep(0.2)
    victim = processes[-1].pid
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    found = results(processes, tmp_path / "ranks", 60)[0]
    assert found["usable"] == 1000
    assert "has exited; restart the whole replica" in found["error"]
    assert found["failed_at"] - killed_at < 1.0
