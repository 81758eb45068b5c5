"""Runs `scripts/quality` on a GPU with the Triton kernels, for all questions and all held-out text."""

from __future__ import annotations

import math

import pytest

from tests.demo_model.quality import FORMS, measure

pytestmark = pytest.mark.gpu


def test_the_quality_loss_of_fp8_weights_blocks_and_cache_is_within_its_limit() -> None:
    scores = measure("cuda", "bfloat16")
    assert [score.form for score in scores] == [form.name for form in FORMS]
    assert scores[0].right == scores[0].asked == 200
    # This is the perplexity on the model card, which transformers computed in bfloat16.
    assert math.log(scores[0].perplexity) == pytest.approx(2.5297, abs=0.002)
    for score in scores[1:]:
        assert score.token_change > 0.01, f"{score.form}: nothing is quantised"
        assert score.passes, score
