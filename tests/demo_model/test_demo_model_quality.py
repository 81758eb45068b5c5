"""Tests that FP8 preserves the shipped model's answers and its perplexity on held-out text, as a short
version of `scripts/quality`."""

from __future__ import annotations

from dataclasses import replace

from tests.demo_model.quality import FORMS, MIN_KEPT, Score, held_out_windows, measure


def test_the_quality_loss_of_fp8_weights_blocks_and_cache_is_within_its_limit() -> None:
    """Uses 20 questions and 3 of 57 windows of text. docs/quantisation.md has the full results."""
    plain, *quantised = measure("cpu", "float32", asked=20, windows=3)
    assert (plain.right, plain.asked, plain.held_out_tokens) == (20, 20, 3 * 1024)
    for score, form in zip(quantised, FORMS[1:], strict=True):
        assert score.form == form.name
        assert score.token_change > 0.01, f"{form.name}: nothing is quantised"
        assert abs(score.perplexity_change) <= form.most_perplexity_change, form.name
        assert score.kept >= MIN_KEPT, form.name
        assert score.passes
    assert len({score.perplexity for score in quantised}) == len(quantised)


def test_the_held_out_text_is_that_of_the_model_card() -> None:
    windows = held_out_windows()
    assert {len(window) for window in windows} == {1025}
    assert len(windows) == 57


def test_a_variant_with_too_much_quality_loss_fails() -> None:
    fine = Score(
        device="cpu",
        dtype="float32",
        form="FP8 weights",
        perplexity=12.6,
        perplexity_change=0.004,
        change_error=0.0005,
        most_perplexity_change=0.005,
        token_change=0.08,
        held_out_tokens=57 * 1024,
        right=199,
        asked=200,
        kept=0.995,
        same=180,
    )
    assert fine.passes
    assert not replace(fine, perplexity_change=0.0051).passes
    assert not replace(fine, perplexity_change=-0.0051).passes
    assert not replace(fine, kept=0.965).passes
