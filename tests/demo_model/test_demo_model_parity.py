"""Tests of the comparison between two devices. Answers may diverge only at a near tie."""

from __future__ import annotations

import math

import pytest
import torch

from engine.generate import GeneratedSample
from engine.messages import TokenLogprob
from engine.sampler import Sampler
from tests.demo_model.asking import engine, generated, share_right
from tests.demo_model.parity import NEAR_TIE, compare

BEST, SECOND, OTHER = 7, 8, 9


def answer(*tokens: int, gap: float = 3.0) -> GeneratedSample:
    """Return an answer in which BEST is always the most likely token, ahead of SECOND by `gap`."""
    top = [(BEST, -0.1), (SECOND, -0.1 - gap)]
    known = dict(top)
    logprobs = [TokenLogprob(token, known.get(token, -20.0), top) for token in tokens]
    return GeneratedSample(token_ids=list(tokens), finish_reason="stop", logprobs=logprobs)


def test_equal_answers_pass_at_any_gap() -> None:
    parity = compare("cuda", "bfloat16", [answer(BEST, BEST)] * 2, [answer(BEST, BEST, gap=0.5)] * 2)
    assert (parity.asked, parity.same, parity.tokens, parity.divergences) == (2, 2, 4, [])
    assert parity.min_gap == pytest.approx(0.5)
    assert parity.most_moved == pytest.approx(2.5)
    assert parity.passes


def test_an_answer_may_diverge_to_the_second_token_only_at_a_near_tie() -> None:
    known = answer(BEST, BEST, BEST, gap=NEAR_TIE / 2)
    parity = compare("cuda", "bfloat16", [known, answer(BEST, SECOND, OTHER)], [known, known])
    (parted,) = parity.divergences
    assert (parted.question, parted.place, parted.second) == (1, 1, True)
    assert parted.gap == pytest.approx(NEAR_TIE / 2)
    assert (parity.same, parity.tokens) == (1, 4)
    assert parity.passes

    for gap in (1.01 * NEAR_TIE, 3.0):
        known = answer(BEST, BEST, gap=gap)
        parity = compare("cuda", "bfloat16", [answer(BEST, SECOND)], [known])
        assert not parity.passes
        assert f"first divergences: at most {gap:.4f}" in parity.summary() and "FAILS" in parity.summary()


def test_a_divergence_to_a_token_other_than_the_second_fails() -> None:
    known = answer(BEST, BEST, gap=NEAR_TIE / 2)
    assert not compare("cuda", "bfloat16", [answer(OTHER, BEST)], [known]).passes


def test_an_answer_that_ends_too_early_or_too_late_is_detected() -> None:
    known = answer(BEST, BEST, gap=NEAR_TIE / 2)
    assert not compare("cuda", "bfloat16", [answer(BEST)], [known]).passes
    with pytest.raises(ValueError, match="question 0: the reference ends after 2 tokens"):
        compare("cuda", "bfloat16", [answer(BEST, BEST, BEST)], [known])


def test_all_questions_are_answered_as_documented_and_the_near_tie_bound_is_two_rounding_steps_of_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU, bfloat16 changes the float32 gap between the top two tokens by at most about two units in the
    last place of the largest logit, and changes no token."""
    largest = []
    real = Sampler.token_logprobs

    def spy(self: Sampler, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        largest.append(float(logits.abs().max()))
        return real(self, logits, token_ids, top)

    monkeypatch.setattr(Sampler, "token_logprobs", spy)
    reference, found = (generated(engine("cpu", dtype), logprobs=2) for dtype in ("bfloat16", "float32"))
    assert share_right([answer.token_ids for answer in found]) >= 0.99
    parity = compare("cpu", "float32", found, reference)
    unit = torch.finfo(torch.bfloat16).eps * 2.0 ** math.floor(math.log2(max(largest)))
    assert 2 * unit == NEAR_TIE
    assert NEAR_TIE / 4 < parity.most_moved < 2 * NEAR_TIE
    assert (parity.asked, parity.same, parity.passes) == (200, 200, True)
    assert parity.tokens > 3000
