"""Tests of the engine on a GPU. The demo model's answers must be correct, and its tokens must be the same as
on the CPU."""

from __future__ import annotations

import pytest

from engine.messages import SamplingParams
from tests.demo_model.asking import answers, engine, questions, share_right
from tests.demo_model.parity import measure

pytestmark = pytest.mark.gpu


def test_float16_with_fp8_weights_answers_as_documented() -> None:
    """GEMMs with few rows use Triton kernels. GEMMs with many rows use the library, which always returns
    bfloat16."""
    assert share_right(answers(engine("cuda", "float16", weights="fp8"))) >= 0.95


def test_float32_generates_the_tokens_of_the_cpu() -> None:
    assert answers(engine("cuda", "float32")) == answers(engine("cpu", "float32"))


def test_bfloat16_generates_the_tokens_of_the_cpu_up_to_near_ties(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The Triton kernels do not support float32, so this test uses bfloat16. `scripts/quality --device cuda`
    records the measurements."""
    parity = measure("cuda")
    with capsys.disabled():
        print(f"\n{parity.summary()}")
    assert parity.asked == 200
    assert parity.passes, parity.divergences


def test_a_seed_gives_the_same_sample_in_any_batch() -> None:
    made = engine("cuda", "float32")
    prompts, _ = questions()
    sampling = [SamplingParams(max_tokens=40, temperature=1.0, top_p=0.9, seed=seed) for seed in range(20)]
    together = [sample[0].token_ids for sample in made.generate(prompts[:20], sampling)]
    alone = [made.generate([prompts[i]], sampling[i])[0][0].token_ids for i in range(0, 20, 5)]
    made.close()
    assert alone == together[::5]
