"""Tests of what can happen between a request's admission and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import openai
import pytest

from appliance.channel.core_messages import Abort, Admitted, Preempted, Refused
from appliance.channel.front_messages import Settle
from appliance.channel.identity import Identity
from appliance.channel.served_models import Route
from appliance.front.generation import Generation
from appliance.front.generation_task import GenerationTask, Prompt
from appliance.front.stream import MAX_HELD_LOGPROB_OUTPUTS, MAX_HELD_OUTPUTS, EventStream
from engine.messages import SamplingParams, Submit
from tests.front.harness import KEY, MODEL, Harness
from tests.front.raw import Answer, ask, chat, connect, events, read_answer, request

HELLO = [{"role": "user", "content": "hi"}]


def send(front: Harness, sock: socket.socket, **fields: object) -> None:
    sock.sendall(request(chat(**fields)))


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_cancelled_and_settled_once(front: Harness, stream: bool) -> None:
    letter = front.tokenizer.decode([50])
    front.endless(50)
    with connect(front) as sock:
        send(front, sock, stream=stream, n=2)
        front.wait_for(lambda: len(front.replica.running) == 2)
        received = b""
        while stream and f'"content":"{letter}'.encode() not in received:
            received += sock.recv(1000)
    front.wait_for(lambda: not front.replica.running)
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason, settle.submitted) == (499, "cancelled", True)
    assert (settle.delivered_tokens > 0) == stream
    time.sleep(0.05)
    assert len(front.settles) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_admission_is_logged(front: Harness, stream: bool) -> None:
    with connect(front) as sock:
        long = [{"role": "user", "content": "fox " * 300_000}]
        send(front, sock, stream=stream, messages=long, truncate_prompt_tokens=1)
    front.wait_for(lambda: bool(front.rejected or front.settles))
    (rejected,) = front.rejected
    assert (rejected.status, rejected.model) == (499, MODEL)
    assert not front.admits and not front.settles and not front.worked


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_queued_withdraws_its_request(front: Harness, stream: bool) -> None:
    front.admit = "hold"
    with connect(front) as sock:
        send(front, sock, stream=stream)
        front.wait_for(lambda: len(front.admits) == 1)
    (settle,) = front.settled(1)
    assert (settle.status, settle.submitted, settle.delivered_tokens) == (499, False, 0)
    # This admission arrives after the front process has withdrawn the request, as if the two messages had
    # crossed. The front process must not submit the request.
    front.send(Admitted(front.admits[0].request_id, 0, front.replica.name, "salt", 1))
    time.sleep(0.05)
    assert not front.replica.submits and len(front.settles) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_with_the_same_text_after_its_replica_is_lost(
    front: Harness, stream: bool
) -> None:
    front.replica.die_after = 5
    front.admit = "hold"
    with connect(front) as sock:
        send(front, sock, stream=stream, n=2, logprobs=True, stop=["never seen"])
        front.wait_for(lambda: len(front.admits) == 1)
        first = front.replica
        front.send(Admitted(front.admits[0].request_id, 0, first.name, "salt", 1))
        front.wait_for(lambda: len(front.admits) == 2)
        again = front.admits[1]
        emitted = 5
        prompt = first.submits[0].prompt_tokens
        assert (again.attempt, again.submissions, again.num_seqs) == (1, 2, 2)
        assert again.prompt_tokens == 2 * (prompt + emitted)
        assert again.max_tokens == front.admits[0].max_tokens - 2 * emitted
        second = front.attach("demo-1")
        front.send(Admitted(again.request_id, 1, "demo-1", "salt", 1))
        answer = read_answer(sock)
    assert [(s.n, s.first_sample, len(s.output_token_ids)) for s in second.submits] == [(1, 0, 5), (1, 1, 5)]
    assert second.submits[0].sampling == first.submits[0].sampling
    texts, tokens = ["", ""], [0, 0]
    if stream:
        for event in events(answer)[:-1]:
            choice = event["choices"][0]
            texts[choice["index"]] += choice["delta"].get("content", "")
            tokens[choice["index"]] += len((choice["logprobs"] or {"content": []})["content"])
    else:
        texts = [choice["message"]["content"] for choice in answer.json["choices"]]
        tokens = [len(choice["logprobs"]["content"]) for choice in answer.json["choices"]]
    assert texts == [front.text(0), front.text(1)]
    assert tokens == [len(front.sentence_script(first.submits[0], sample)) - 1 for sample in (0, 1)]
    (settle,) = front.settled(1)
    assert (settle.status, settle.submitted) == (200, True)


def test_an_echo_is_delivered_once_even_if_the_replica_is_lost(front: Harness) -> None:
    front.replica.die_after = 5
    front.admit = "hold"
    body = {"model": MODEL, "prompt": "quick", "echo": True, "logprobs": 1, "max_tokens": -1}
    with connect(front) as sock:
        sock.sendall(request(body, "/v1/completions"))
        front.wait_for(lambda: len(front.admits) == 1)
        front.send(Admitted(front.admits[0].request_id, 0, front.replica.name, "salt", 1))
        front.wait_for(lambda: len(front.admits) == 2)
        second = front.attach("demo-1")
        front.send(Admitted(front.admits[0].request_id, 1, "demo-1", "salt", 1))
        choice = read_answer(sock).json["choices"][0]
    assert second.submits[0].sampling.prompt_logprobs is None
    assert choice["text"] == "quick" + front.text()
    assert choice["logprobs"]["token_logprobs"].count(None) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_fails_after_losing_several_replicas(front: Harness, stream: bool) -> None:
    names = [front.attach(f"dying-{number}").name for number in range(4)]
    front.admit = "hold"
    with connect(front) as sock:
        send(front, sock, stream=stream)
        for attempt, name in enumerate(names):
            front.replicas[name].die_after = 2
            front.wait_for(lambda attempt=attempt: len(front.admits) == attempt + 1)  # type: ignore[misc]
            front.send(Admitted(front.admits[-1].request_id, attempt, name, "salt", 1))
        answer = read_answer(sock)
    if stream:
        assert answer.status == 200
        assert events(answer)[-1]["error"]["code"] == "replica_failed"
    else:
        assert answer.status == 503
        assert answer.error["code"] == "replica_failed"
        assert int(answer.headers["retry-after"]) > 0
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason) == (503, "error")


def test_replicas_that_are_stopped_for_other_models_do_not_count_as_lost(front: Harness) -> None:
    names = [front.attach(f"stopped-{number}").name for number in range(6)]
    front.admit = "hold"
    with connect(front) as sock:
        send(front, sock, stream=False)
        for attempt, name in enumerate(names):
            front.replicas[name].die_after = 2
            front.wait_for(lambda attempt=attempt: len(front.admits) == attempt + 1)  # type: ignore[misc]
            request_id = front.admits[-1].request_id
            front.send(Admitted(request_id, attempt, name, "salt", 1))
            front.send(Preempted(request_id))
        front.wait_for(lambda: len(front.admits) == 7)
        last = front.attach("last")
        front.send(Admitted(front.admits[-1].request_id, 6, last.name, "salt", 1))
        answer = read_answer(sock)
    assert answer.status == 200 and answer.json["choices"][0]["message"]["content"] == front.text()


def test_a_request_waits_for_a_model_that_is_loaded_on_demand(front: Harness) -> None:
    later = Route(name="later", unit="", on_demand=True)
    front.configure(routes=[later, Route(name=MODEL, unit=MODEL)])
    body = {"model": "later", "prompt": "quick", "max_tokens": -1}
    try:
        with connect(front) as first, connect(front) as second:
            for sock in (first, second):
                sock.sendall(request(body, "/v1/completions"))
            front.wait_for(lambda: front.reports[-1].wanted == ("later",))
            # Every report contains the model's name for as long as requests wait for the model.
            assert front.report().wanted == ("later",)
            assert ask(front, "GET", "/v1/models/later").json["max_model_len"] is None
            assert "later" in [one["id"] for one in ask(front, "GET", "/v1/models").json["data"]]
            front.configure(routes=[Route(name="later", unit=MODEL)])
            assert [read_answer(sock).status for sock in (first, second)] == [200, 200]
        assert front.report().wanted == ()
        front.configure(routes=[msgspec.structs.replace(later, listed=False, problem="the disk is broken")])
        front.wait_for(lambda: ask(front, "GET", "/v1/models").json["data"] == [])
        refused = ask(front, "POST", "/v1/completions", body)
        assert refused.status == 503 and "the disk is broken" in refused.error["message"]
        assert int(refused.headers["retry-after"]) > 0
        assert front.report().wanted == ()
    finally:
        front.reconfigure()


def test_openais_client_retries_after_a_503(front: Harness, client: openai.OpenAI) -> None:
    front.refusal = Refused("", 0, 503, "queue_full", "full", 0.01)
    front.admit = "refuse"
    with pytest.raises(openai.InternalServerError):
        client.with_options(max_retries=2).chat.completions.create(model=MODEL, messages=HELLO)
    assert len(front.admits) == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_abort_reaches_the_client_as_an_error(front: Harness, stream: bool) -> None:
    front.endless()
    with connect(front) as sock:
        send(front, sock, stream=stream)
        front.wait_for(lambda: len(front.replica.running) == 1)
        if stream:
            assert sock.recv(1, socket.MSG_PEEK)
        front.send(Abort(front.admits[0].request_id, "the operator ended it"))
        answer = read_answer(sock)
    error = events(answer)[-1]["error"] if stream else answer.error
    assert error["message"] == "the operator ended it"
    assert answer.status == (200 if stream else 503)
    front.wait_for(lambda: not front.replica.running)
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason, settle.error) == (503, "cancelled", "the operator ended it")


def test_openais_client_raises_the_error_event_of_a_stream(client: openai.OpenAI, front: Harness) -> None:
    front.endless()
    stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    next(iter(stream))
    front.send(Abort(front.admits[0].request_id, "the operator ended it"))
    with pytest.raises(openai.APIError, match="the operator ended it"):
        list(stream)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_rejects_is_a_client_error(front: Harness, stream: bool) -> None:
    front.replica.fail_with = "logit_bias: no"
    answer = ask(front, "POST", "/v1/chat/completions", chat(stream=stream, n=2))
    assert answer.status == 400
    assert answer.error["message"] == "logit_bias: no"
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason) == (400, "error")


@pytest.mark.parametrize("stream", [False, True])
def test_an_overflow_at_the_first_token_is_a_server_error(front: Harness, stream: bool) -> None:
    front.replica.fail_with, front.replica.fail_refuses = "the model computed NaN", False
    answer = ask(front, "POST", "/v1/chat/completions", chat(stream=stream))
    assert (answer.status, answer.error["code"]) == (503, "engine_error")
    assert int(answer.headers["retry-after"]) > 0, "the response tells clients to retry"
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason) == (503, "error")


def test_nothing_is_submitted_to_a_replica_after_its_channel_has_closed() -> None:
    async def run() -> None:
        class DyingLink:
            """A link whose channel breaks at the second submission."""

            submitted = 0

            def next_handle(self) -> int:
                return 1 + self.submitted

            def submit(self, submit: Submit, sink: object, on_disconnect: Callable[[], None]) -> None:
                self.submitted += 1
                if self.submitted == 2:
                    on_disconnect()

        link = DyingLink()
        prompts = [Prompt(index, [5], 3) for index in range(4)]
        model: Any = SimpleNamespace(tokenizer=SimpleNamespace(stream=lambda *_, **__: None))
        task = GenerationTask(
            model=model, chat=False, prompts=prompts, n=1, sampling=SamplingParams(max_tokens=3)
        )
        body = SimpleNamespace(release=lambda: None)
        context: Any = SimpleNamespace(identity=Identity(tenant="t"), request_id="r", body=body)
        state: Any = SimpleNamespace(replicas={"m-0": link})
        generation = Generation(state, context, task)
        generation.admitted(Admitted("r", 0, "m-0", "salt", 1))
        assert link.submitted == 2
        assert generation._handles == []
        assert generation._retry is not None
        generation._retry.cancel()

    asyncio.run(run())


def test_a_stream_is_done_after_an_error_in_its_last_events(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        model: Any = SimpleNamespace(
            tokenizer=SimpleNamespace(stream=lambda *_, **__: None), served=SimpleNamespace(version="v1")
        )
        task = GenerationTask(
            model=model, chat=True, prompts=[Prompt(0, [5], 3)], n=1, sampling=SamplingParams(max_tokens=3)
        )
        connection = SimpleNamespace(writable=True, release=lambda: None, abort=lambda: aborted.append(True))
        context: Any = SimpleNamespace(
            identity=Identity(tenant="t"),
            request_id="r",
            arrived_at=0.0,
            model="m",
            connection=connection,
            elapsed_ms=lambda *_: 0.0,
        )
        state: Any = SimpleNamespace(active={}, to_core=settled.append, flush_soon=lambda _: None)
        generation = Generation(state, context, task)
        stream = EventStream(generation)
        stream.open()
        stream.progress(generation.samples[0])
        generation._end()
        monkeypatch.setattr(stream, "_build", lambda *_: 1 // 0)
        stream.flush()
        assert stream.done.is_set() and aborted
        assert [settle.status for settle in settled] == [500]

    aborted: list[bool] = []
    settled: list[Settle] = []
    asyncio.run(run())


@pytest.mark.usefixtures("restore_models")
def test_a_slow_reader_takes_bounded_memory_and_delays_no_other_client(front: Harness) -> None:
    whole = front.tokenizer.encode_blocking(front.text() * 4, False)

    def made(tokens: int) -> list[int]:
        return [whole[position % len(whole)] for position in range(tokens)]

    # If each token were sent as a separate event, the answer would be much too large for the buffers of the
    # sockets and of the transport.
    slow_tokens = 10_000
    front.models = [front.served(max_model_len=1 << 20)]
    front.configure()
    front.wait_for(lambda: ask(front, "GET", f"/v1/models/{MODEL}").json["max_model_len"] == 1 << 20)
    front.replica.script = lambda submit, sample: whole
    front.replica.burst = 10
    before = rss_bytes(front.process.pid)
    with connect(front) as slow:
        send(front, slow, stream=True, ignore_eos=True, max_tokens=slow_tokens)
        front.wait_for(lambda: len(front.replica.running) == 1)
        quick = ask(front, "POST", "/v1/chat/completions", chat(stream=True, ignore_eos=True, max_tokens=200))
        assert content(quick) == front.tokenizer.decode(made(200))
        front.wait_for(lambda: not front.replica.running, 60)
        assert rss_bytes(front.process.pid) - before < 8 << 20
        answer = read_answer(slow)
    chunks = events(answer)
    text = content(answer)
    assert text == front.tokenizer.decode(made(slow_tokens))
    # The front process stored the text that it could not send, and later sent it as one event, although each
    # decode step produced only a small part of it.
    assert max(len(chunk["choices"][0]["delta"].get("content", "")) for chunk in chunks[:-1]) > len(text) / 2
    front.wait_for(lambda: len(front.settles) == 2)
    assert sum(settle.delivered_tokens for settle in front.settles) == slow_tokens + 200


@pytest.mark.usefixtures("restore_models")
def test_a_stream_ends_if_its_client_leaves_after_the_last_token(front: Harness) -> None:
    front.models = [front.served(max_model_len=1 << 20)]
    front.reconfigure()
    front.replica.script = lambda submit, sample: [50]
    front.replica.burst = 10
    with connect(front) as slow:
        fields = {"n": 8, "max_tokens": 500, "logprobs": True, "top_logprobs": 20}
        send(front, slow, stream=True, ignore_eos=True, **fields)
        front.wait_for(lambda: len(front.replica.running) == 8)
        front.wait_for(lambda: not front.replica.running)
        assert front.report().streams == 1 and not front.settles
    front.wait_for(lambda: front.report().streams == 0)
    assert [settle.status for settle in front.settles] == [499]


@pytest.mark.usefixtures("restore_models")
@pytest.mark.parametrize(
    ("fields", "max_held"), [({}, MAX_HELD_OUTPUTS), ({"logprobs": True}, MAX_HELD_LOGPROB_OUTPUTS)]
)
def test_a_request_ends_when_too_many_outputs_wait_for_its_client(
    front: Harness, fields: dict[str, bool], max_held: int
) -> None:
    samples = 128
    front.models = [front.served(max_model_len=1 << 20)]
    front.reconfigure()
    front.replica.script = lambda submit, sample: [50]
    front.replica.burst = 10
    steps_before = front.replica.steps
    with connect(front) as slow:
        send(front, slow, stream=True, ignore_eos=True, n=samples, max_tokens=8000, **fields)
        (settle,) = front.settled(1, 120)
        generated = samples * (front.replica.steps - steps_before)
        assert (settle.status, settle.finish_reason) == (499, "cancelled")
        assert max_held < generated - settle.delivered_tokens
        front.wait_for(lambda: not front.replica.running)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := slow.recv(1 << 20):
                received += piece
    assert b"data: [DONE]" not in received


def content(answer: Answer) -> str:
    """Return the text of a stream."""
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer)[:-1])


def rss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_two_pipelined_requests_are_both_answered(front: Harness) -> None:
    buffer = bytearray()
    with connect(front) as sock:
        sock.sendall(request(chat(stream=True)) * 2)
        first, second = read_answer(sock, buffer), read_answer(sock, buffer)
    assert events(first)[-1] == events(second)[-1] == "[DONE]"
    assert [settle.status for settle in front.settled(2)] == [200, 200]


def test_many_streams_at_once_each_get_their_own_text(front: Harness) -> None:
    socks = [connect(front, tcp=number % 2 == 0) for number in range(32)]
    for number, sock in enumerate(socks):
        body = chat(stream=True, n=1 + number % 3)
        sock.sendall(request(body, headers={"Authorization": f"Bearer {KEY}"}))
    for number, sock in enumerate(socks):
        texts = [""] * (1 + number % 3)
        for event in events(read_answer(sock))[:-1]:
            texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
        assert texts == [front.text(sample) for sample in range(1 + number % 3)]
        sock.close()
    assert {settle.status for settle in front.settled(32)} == {200}
