"""Tests that the front process passes deadlines to the core, and that clients receive the right response if a
deadline cannot be met."""

from __future__ import annotations

import openai
import pytest

from appliance.channel.core_messages import Admitted, Refused
from tests.front.harness import MODEL, Harness
from tests.front.raw import ask, chat, connect, request


def test_a_deadline_reaches_the_core(front: Harness) -> None:
    for text, deadline_ms in (("1500", 1500.0), (" 0.5 ", 0.5), ("86400000", 86_400_000.0)):
        ask(front, "POST", "/v1/chat/completions", chat(), {"X-Appliance-Deadline-Ms": text})
        assert front.admits[-1].deadline_ms == deadline_ms
    ask(front, "POST", "/v1/chat/completions", chat())
    assert front.admits[-1].deadline_ms is None


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf", "86400001", "1,5"])
def test_an_invalid_deadline_is_refused_with_the_headers_name(front: Harness, text: str) -> None:
    answer = ask(front, "POST", "/v1/chat/completions", chat(), {"x-appliance-deadline-ms": text})
    assert (answer.status, answer.error["param"]) == (400, "x-appliance-deadline-ms")
    assert not front.admits


def test_clients_do_not_retry_a_request_whose_deadline_cannot_be_met(
    front: Harness, client: openai.OpenAI
) -> None:
    front.admit = "refuse"
    front.refusal = Refused("", 0, 503, "deadline_unreachable", "it would take too long", useless=True)
    with pytest.raises(openai.APIStatusError) as caught:
        client.with_options(max_retries=2).chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}]
        )
    assert (caught.value.status_code, caught.value.code) == (503, "deadline_unreachable")
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "retry-after" not in caught.value.response.headers
    assert len(front.admits) == 1


@pytest.mark.parametrize(("urgency", "reserved_slots"), [(2, 0), (0, 3)])
def test_urgency_and_reserved_slots_reach_the_engine(
    front: Harness, urgency: int, reserved_slots: int
) -> None:
    front.admit = "hold"
    with connect(front) as sock:
        sock.sendall(request(chat()))
        front.wait_for(lambda: front.admits)
        request_id, replica = front.admits[0].request_id, front.replica.name
        turn = Admitted(request_id, 0, replica, "salt", 1, urgency=urgency, reserved_slots=reserved_slots)
        front.send(turn)
        front.wait_for(lambda: front.replica.submits)
        front.settled(1)
    submit = front.replica.submits[0]
    assert (submit.urgency, submit.reserved_slots) == (urgency, reserved_slots)
