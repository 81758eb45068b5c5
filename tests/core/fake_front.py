"""A front process without HTTP. A connection sends one line "MODEL MAX_TOKENS" and receives one line per
token, followed by a line with the finish reason. The fake front implements the core's protocol, including
resubmissions. If a model's folder contains a file named `hang`, the fake front hangs as soon as that model is
configured."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import secrets
import signal
import socket
import time
from pathlib import Path

import msgspec

from appliance.channel.core_messages import (
    Abort,
    Admitted,
    AskProgress,
    AttachReplica,
    ClientConnection,
    Configure,
    CoreToFront,
    Identities,
    Refused,
    StopFront,
)
from appliance.channel.front_messages import (
    Admit,
    FrontProgress,
    FrontReady,
    FrontReport,
    NotTaken,
    RequestProgress,
    Settle,
    Taken,
)
from appliance.channel.identity import Identity
from appliance.channel.served_models import ServedModel
from engine.client import Channel, ReplicaClient
from engine.messages import Output, SamplingParams, Submit, pack_tokens


class Call:
    """One connection's request."""

    def __init__(self, front: FakeFront, writer: asyncio.StreamWriter, model: str, max_tokens: int) -> None:
        self.front = front
        self.writer = writer
        self.tokens: list[int] = []
        self.submitted = False
        self.started = time.time()
        self.admit = Admit(
            request_id=f"req-{secrets.token_hex(6)}",
            identity=Identity(tenant="t"),
            peer="uid 0",
            endpoint="/fake",
            model=model,
            stream=True,
            submissions=1,
            num_seqs=1,
            prompt_tokens=4,
            max_tokens=max_tokens,
            arrived_at=self.started,
        )

    def ask(self) -> None:
        self.submitted = False
        self.front.calls[self.admit.request_id] = self
        self.front.channel.send(self.admit)

    def ask_again(self) -> None:
        self.admit = msgspec.structs.replace(self.admit, attempt=self.admit.attempt + 1)
        self.ask()

    def admitted(self, turn: Admitted) -> None:
        client = self.front.replicas.get(turn.replica)
        if client is None or client.closed:
            self.front.loop.call_later(0.05, self.ask_again)
            return
        self.submitted = True
        submit = Submit(
            handle=client.next_handle(),
            request_id=turn.request_id,
            prompt=pack_tokens([1, 2, 3, 4]),
            output_token_ids=list(self.tokens),
            sampling=SamplingParams(max_tokens=self.admit.max_tokens),
        )
        self.front.handles[(turn.replica, submit.handle)] = self
        client.submit(submit, self.take)

    def take(self, output: Output) -> None:
        self.tokens += output.token_ids
        for token in output.token_ids:
            self.writer.write(b"%d\n" % token)
        if output.finish_reason:
            self.end(200, output.finish_reason)

    def cancel(self) -> None:
        for (replica, handle), call in self.front.handles.items():
            if call is self:
                self.front.replicas[replica].cancel(handle)

    def end(self, status: int, how: str) -> None:
        if self.front.calls.pop(self.admit.request_id, None) is None:
            return
        self.front.channel.send(
            Settle(
                request_id=self.admit.request_id,
                submitted=self.submitted,
                status=status,
                finish_reason=how,
                delivered_tokens=len(self.tokens),
                e2e_ms=(time.time() - self.started) * 1000,
            )
        )
        self.hang_up(how)

    def hang_up(self, word: str) -> None:
        self.writer.write(f"{self.front.name} {word}\n".encode())
        self.writer.close()


class FakeFront:
    def __init__(self, channel: Channel[CoreToFront]) -> None:
        self.channel = channel
        self.loop = asyncio.get_running_loop()
        self.name = ""
        self.replicas: dict[str, ReplicaClient] = {}
        self.handles: dict[tuple[str, int], Call] = {}
        self.calls: dict[str, Call] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self.models: list[ServedModel] = []
        self.configured = 0

    def hear(self, message: CoreToFront) -> None:
        if isinstance(message, Configure):
            first, self.name, self.models = not self.name, message.front, message.models
            self.configured = message.serial
            while first and any((Path(model.folder) / "hang").exists() for model in self.models):
                time.sleep(0.05)  # A front that hangs does not read messages.
            if first:
                self.channel.send(FrontReady())
        elif isinstance(message, AttachReplica):
            sock = socket.socket(fileno=self.channel.take_fd())
            name = message.replica
            self.replicas[name] = ReplicaClient(sock, lambda handles: self.disconnected(name, handles))
        elif isinstance(message, ClientConnection):
            try:
                sock = socket.socket(fileno=self.channel.take_fd())
            except LookupError:
                self.channel.send(NotTaken(message.number))
                return
            self.channel.send(Taken(message.number))
            task = self.loop.create_task(self.converse(sock))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        elif isinstance(message, StopFront):
            task = self.loop.create_task(self.stop())
            self.tasks.add(task)
        elif isinstance(message, AskProgress):
            progress = [
                RequestProgress(name, len(call.tokens), 0, 0.01 if call.tokens else None)
                for name, call in self.calls.items()
            ]
            self.channel.send(FrontProgress(message.number, progress))
        elif isinstance(message, Identities):
            pass
        elif (call := self.calls.get(message.request_id)) is not None:
            if isinstance(message, Admitted):
                call.admitted(message)
            elif isinstance(message, Refused):
                word = f"refused {message.status} {message.message}"
                if message.attempt:
                    call.end(message.status, word)
                else:
                    del self.calls[message.request_id]
                    call.hang_up(word)
            elif isinstance(message, Abort):
                call.cancel()
                call.end(503, f"aborted {message.message}")

    def disconnected(self, name: str, handles: list[int]) -> None:
        for handle in handles:
            self.handles[(name, handle)].ask_again()

    async def converse(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=sock)
        model, max_tokens = (await reader.readline()).split()
        Call(self, writer, model.decode(), int(max_tokens)).ask()

    async def stop(self) -> None:
        while self.calls:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.02)
        os._exit(0)

    def problems(self) -> dict[str, str]:
        """Return a problem for each model that this front cannot serve: those with a file named `untold` in
        their folder."""
        return {
            model.name: "tokenizer.json is missing"
            for model in self.models
            if (Path(model.folder) / "untold").exists()
        }

    async def report(self) -> None:
        while True:
            self.channel.send(
                FrontReport(
                    connections=0,
                    max_connections=4096,
                    streams=len(self.calls),
                    requests=0,
                    tokens=10,
                    unauthenticated=0,
                    cpu_seconds=0.001,
                    dropped_texts=3,
                    problems=self.problems(),
                    configured=self.configured,
                )
            )
            await asyncio.sleep(0.1)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int)
    parser.add_argument("--name")
    parser.add_argument("--log-level")
    descriptor = parser.parse_args().channel
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    channel: Channel[CoreToFront] = Channel(socket.socket(fileno=descriptor), CoreToFront)
    front = FakeFront(channel)
    channel.listen(front.hear, lambda: os._exit(0))
    await front.report()


if __name__ == "__main__":
    asyncio.run(main())
