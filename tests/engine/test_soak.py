"""Tests of the soak test: a short run, and the defects that it must detect. `scripts/soak` runs the soak test
for half an hour."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.core import StepResult
from engine.messages import Output, SamplingParams, Submit, TokenLogprob, pack_tokens
from engine.rank_messages import Finished
from tests.engine import soak
from tests.engine.output_checker import Entry, OutputChecker, Told
from tests.engine.soak_known import Answer, Known


def report(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Run the soak test, check that it found nothing wrong, and return its output."""
    path = tmp_path / "report.json"
    assert soak.main([*arguments, "--json", str(path)]) == 0
    stats: dict[str, Any] = json.loads(path.read_text())
    return stats


def test_random_traffic_leaves_no_slot_block_or_credit_behind(tmp_path: Path) -> None:
    stats = report(tmp_path, "--rounds", "3", "--seed", "6", "--known", "8")
    assert stats["wrong"] is None
    assert stats["preemptions"] > 0 and stats["cached_tokens"] > 0 and stats["fronts disconnected"] > 0
    assert stats["most blocks used"] == stats["info"]["kv_blocks"]
    assert set(stats["cancelled"]) == {"queued", "prefilling", "decoding"}
    assert {"length", "stop", "cancelled", "error", "undelivered"} <= set(stats["ended"])
    assert stats["known"]["tokens"] > 500


def test_a_pool_can_be_filled_to_its_last_block(tmp_path: Path) -> None:
    stats = report(tmp_path, "--fill", "--kv-blocks", "20")
    assert stats["most_blocks"] == stats["blocks"] == 20
    assert stats["preemptions"] > 0 and stats["most_running"] == stats["rows"]


# ── defects that it must detect ───────────────────────────────────────────────────────────────────

SUBMIT = Submit(
    handle=1, request_id="request-1", prompt=pack_tokens([3, 4]), sampling=SamplingParams(max_tokens=2)
)


def said(*outputs: Output, finish_reason: list[str] | None = None) -> StepResult:
    finished = Finished("request-1", 0, 0, 2, 0, 2, 0, 1, finish_reason or [], 2)
    return StepResult(1, {"front": list(outputs)}, [finished] if finish_reason else [], False, None)


def first(tokens: list[int], finish_reason: str = "", **more: Any) -> Output:
    return Output(1, 0, tokens, finish_reason, cached_tokens=0, **more)


@pytest.mark.parametrize(
    ("results", "complaint"),
    [
        (
            [said(first([5, 6], "length")), said(Output(1, 0, [], "length"))],
            r"output after the end \('length'\)",
        ),
        (
            [said(first([5, 6], "length"), finish_reason=["length"]), said(finish_reason=["length"])],
            "closed twice",
        ),
        (
            [said(first([5, 6], "length"), finish_reason=["length"]), said(Output(1, 0, [7]))],
            "output of a request that had ended",
        ),
        ([said(first([5], "length"))], "1 tokens instead of 2"),
        ([said(first([5, 6], "cancelled"))], "no cancel was sent"),
        ([said(first([5, 6], "error", error="reason"))], "failed: reason"),
        ([said(first([5], finish_reason="")), said(finish_reason=["length"])], "but the outputs ended with"),
    ],
)
def test_the_bookkeeping_detects_defects(results: list[StepResult], complaint: str) -> None:
    checker = OutputChecker(max_model_len=100, vocab=50, poison=None)
    checker.submitted("front", SUBMIT, "")
    with pytest.raises(AssertionError, match=complaint):
        for result in results:
            checker.take(result)


def test_an_output_may_diverge_from_its_reference_only_at_a_near_tie() -> None:
    known = object.__new__(Known)
    known._vocab, known._near_tie = 10, 1e-4

    def listing(*logprobs: float) -> TokenLogprob:
        return TokenLogprob(0, logprobs[0], list(enumerate(logprobs)))

    reference = Answer([0, 0], [listing(-1.0, -1.00005, -3.0), listing(-0.5, -1.0, -2.0)])
    assert known._close(SUBMIT, reference, 0, 1)
    assert not known._close(SUBMIT, reference, 0, 2)
    assert not known._close(SUBMIT, reference, 1, 1)
    # A token far outside the nucleus is never sampled, whatever the value of the noise.
    outside = Answer([0], [listing(-0.3, -1.5)])
    for seed in range(20):
        half = SamplingParams(max_tokens=2, temperature=1.0, top_p=0.5, seed=seed)
        assert not known._close(msgspec.structs.replace(SUBMIT, sampling=half), outside, 0, 1)


def test_a_changed_reference_output_is_detected() -> None:
    known = object.__new__(Known)
    known._vocab, known._near_tie, known._poison, known._draw = 10, 1e-4, 9, random.Random(0)
    known._answers = [Answer([1], [TokenLogprob(1, -0.5, [(1, -0.5), (2, -1.0)])])]
    known.counts, known.largest_error = soak.Counter(), 0.0
    entry = Entry("known", SUBMIT, "", {0: Told(token_ids=[2], finish_reason="length")})
    with pytest.raises(AssertionError, match="token 0 is 2, expected 1, and the two are not a near-tie"):
        known.check(entry)
