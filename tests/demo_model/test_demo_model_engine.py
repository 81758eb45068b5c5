"""Tests that the engine answers the demo model's questions."""

from tests.demo_model.asking import answers, engine, share_right


def test_all_200_frozen_questions_asked_at_once_are_answered_as_documented() -> None:
    assert share_right(answers(engine("cpu", "float32"))) >= 0.99
