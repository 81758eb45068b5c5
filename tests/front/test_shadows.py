"""Tests of how a front process selects requests to copy, and of how it compares the copies' answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.channel.front_messages import ShadowDone
from appliance.channel.served_models import Route, Shadow
from appliance.front.shadows import MAX_COPIES, ShadowTraffic, _equal_tokens


class Background:
    """Collects the copies that were started, without running them."""

    def __init__(self) -> None:
        self.begun: list[Any] = []

    def run(self, work: Any) -> None:
        self.begun.append(work)
        work.close()


def generation(*answers: list[int], prompt: tuple[int, ...] = (1, 2), temperature: float = 0.0) -> Any:
    return SimpleNamespace(
        task=SimpleNamespace(
            prompts=[SimpleNamespace(token_ids=list(prompt))],
            sampling=SimpleNamespace(temperature=temperature),
            copy=SimpleNamespace(unit="chat@2"),
        ),
        samples=[SimpleNamespace(token_ids=answer, delivered=len(answer)) for answer in answers],
        context=SimpleNamespace(model="chat"),
    )


def test_a_share_of_the_requests_is_selected() -> None:
    route = Route(name="chat", unit="chat@1", shadow=Shadow("chat@2", 0.25))
    selected = sum(ShadowTraffic.selects(route) == "chat@2" for _ in range(20_000))
    assert 4_500 < selected < 5_500  # the bounds are more than eight standard deviations from the mean
    assert ShadowTraffic.selects(Route(name="chat", unit="chat@1")) == ""
    assert ShadowTraffic.selects(None) == ""


def test_copies_beyond_the_limit_are_dropped() -> None:
    sent: list[Any] = []
    state: Any = SimpleNamespace(background=Background(), to_core=sent.append)
    shadows = ShadowTraffic(state)
    for _ in range(MAX_COPIES):
        shadows.begin(generation([1]))
    assert shadows.running == MAX_COPIES == len(state.background.begun) and not sent
    shadows.begin(generation([1]))
    assert sent == [ShadowDone(name="chat", unit="chat@2", outcome="dropped")]
    assert len(state.background.begun) == MAX_COPIES


@pytest.mark.parametrize(
    ("original", "copy", "equal"),
    [
        (generation([1, 2, 3]), generation([1, 2, 3]), 3),
        (generation([1, 2, 3]), generation([1, 9, 3]), 1),
        (generation([1, 2]), generation([1, 2, 3]), 2),
        (generation([1, 2], [5, 6]), generation([1, 3], [5, 6]), 3),
        (generation([1], temperature=1.0), generation([1]), None),
        (generation([1]), generation([1], prompt=(1, 3)), None),
    ],
)
def test_tokens_are_equal_up_to_the_first_difference(original: Any, copy: Any, equal: int | None) -> None:
    assert _equal_tokens(original, copy) == equal
