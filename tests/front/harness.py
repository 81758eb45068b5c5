"""A real front process between a simulated core and simulated replicas, with real messages over real sockets.

The simulated parts run on an event loop in a separate thread, so tests may use blocking clients. A replica's
tokens depend only on its script, the submission and the sample. A resubmission therefore continues with the
same tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from appliance.channel.core_messages import (
    Abort,
    Admitted,
    AttachReplica,
    Claimed,
    ClientConnection,
    Configure,
    Identities,
    Preempted,
    Refused,
    StopFront,
)
from appliance.channel.front_messages import (
    Admit,
    Claim,
    FrontReady,
    FrontReport,
    FrontToCore,
    HandOver,
    Keep,
    NotTaken,
    Rejected,
    Release,
    Retried,
    Settle,
    Worked,
)
from appliance.channel.front_settings import KeepRules, Limits, RetryRules
from appliance.channel.identity import Identity
from appliance.channel.served_models import Route, ServedModel
from appliance.front.models import own_route
from appliance.front_pool.claims import Claims
from appliance.text.tokenizer import Tokenizer
from engine.client import Channel, socketpair
from engine.messages import Submit
from store.structs import KeptText
from tests.front.fake_replica import FakeReplica, Script

Result = TypeVar("Result")

KEY = "ak-test-key"
SENTENCE = (
    "The quick brown fox jumps over the lazy dog. Größe, naïve café, 中文字符測試, 😀👩‍👩‍👧‍👦 and so on."
)
MODEL = "demo"
MAX_MODEL_LEN = 512
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['content'] == 'refuse me' %}{{ raise_exception('not this') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{{ mood }}{% endif %}"
)


def write_model(folder: Path) -> Path:
    """Write a model folder with a byte-level tokenizer and a chat template."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([SENTENCE] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Harness:
    """The test harness. Call `start` before using it, and `close` afterwards. Attributes are set on the
    loop's thread and read by tests."""

    folder: Path
    runtime: Path
    limits: Limits = field(default_factory=Limits)
    admit: Literal["at once", "hold", "refuse"] = "at once"
    """The core's reply when a front process requests admission. With "hold", the core never replies."""
    is_elsewhere: bool = False
    """Whether another front process owns all idempotency keys that this one claims."""
    refusal: Refused | None = None
    turn: dict[str, Any] = field(default_factory=dict)
    """Fields of `Admitted` whose values differ from the defaults."""
    models: list[ServedModel] = field(default_factory=list)
    module: str = "appliance.front"
    """Name of the module that implements the front process."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the front process gets in addition to those of the test."""

    def __post_init__(self) -> None:
        self.tokenizer = Tokenizer.load(self.folder)
        self.eos = self.tokenizer.eos_ids[0]
        self.vocab_size = self.tokenizer.vocabulary_size
        self.admits: list[Admit] = []
        """The admissions that the front process has requested."""
        self.settles: list[Settle] = []
        self.refused: set[str] = set()
        self.rejected: list[Rejected] = []
        self.worked: list[Worked] = []
        self.reports: list[FrontReport] = []
        self.serial = 0
        """Serial number of the last configuration sent."""
        self.claims = Claims()
        self.claimed: list[Claim] = []
        self.releases: list[Release] = []
        self.retried: list[Retried] = []
        self.kept: dict[str, list[KeptText]] = {}
        """The texts kept by the front process, keyed by request id."""
        self.moved: list[tuple[HandOver, int, int]] = []
        """Hand-over messages, each with the file descriptors of the connection and of the request, for
        `give_back`."""
        self.not_taken: list[NotTaken] = []
        self.replicas: dict[str, FakeReplica] = {}
        self.script: Script = self.sentence_script
        self.step_s = 0.001
        self.ready = threading.Event()
        self.core_closed = threading.Event()
        self.api_sock = str(self.runtime / "api.sock")
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listeners: list[socket.socket] = []

    # ── for tests ──

    def sentence_script(self, submit: Submit, sample: int) -> list[int]:
        """Return the tokens of a sample: its number and the sentence, both encoded, followed by the end
        token."""
        return [*self.tokenizer.encode_blocking(f"{sample}{SENTENCE}", False), self.eos]

    def text(self, sample: int = 0) -> str:
        """Return the text that `sentence_script` generates."""
        return f"{sample}{SENTENCE}"

    def endless(self, token_id: int = 50) -> None:
        """Make the replica repeat this token until the context of `MAX_MODEL_LEN` tokens is full, which takes
        almost two minutes and thus longer than any test."""
        self.script = self.replica.script = lambda submit, sample: [token_id]
        self.step_s = self.replica.step_s = 0.2

    def call(self, function: Callable[[], Result]) -> Result:
        """Call a function on the loop's thread."""

        async def run() -> Result:
            return function()

        return self.await_(run())

    def await_(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine on the loop's thread and return its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    @property
    def replica(self) -> FakeReplica:
        """The replica that was attached last."""
        return list(self.replicas.values())[-1]

    def report(self) -> FrontReport:
        """Wait for a report that the front process sends after this call, and return it. The next report to
        arrive may have been sent before the call, so wait for the one after it."""
        seen = len(self.reports)
        self.wait_for(lambda: len(self.reports) >= seen + 2)
        return self.reports[-1]

    def settled(self, count: int, timeout_s: float = 60.0) -> list[Settle]:
        """Wait until the front process has settled at least `count` requests, and return all settlements."""
        self.wait_for(lambda: len(self.settles) >= count, timeout_s)
        return self.settles

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Poll until `condition` is true. Raises TimeoutError after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {timeout_s} s waiting for the condition")
            time.sleep(0.005)

    def reset(self) -> None:
        """Clear the recorded messages, and restore the default behaviour."""

        def forget() -> None:
            self.admits, self.settles, self.rejected, self.worked = [], [], [], []
            self.claimed, self.releases, self.retried = [], [], []
            self.kept = {}
            self.is_elsewhere = False
            self.admit, self.refusal, self.turn = "at once", None, {}
            self.script, self.step_s = self.sentence_script, 0.001
            for replica in list(self.replicas.values()):
                if replica.channel.closed:
                    del self.replicas[replica.name]
                replica.submits, replica.cancels = [], []
                replica.hold, replica.die_after, replica.fail_with = False, None, None
                replica.script, replica.step_s, replica.burst = self.script, self.step_s, 1

        # Messages from the previous test may still be in transit.
        self.wait_for(
            lambda: {a.request_id for a in self.admits} <= {s.request_id for s in self.settles} | self.refused
        )
        self.call(forget)
        if not self.replicas:
            self.attach()
        self.configure()

    def served(self, name: str = MODEL, **changes: Any) -> ServedModel:
        """Return a description of the test model with this name and the given changed fields."""
        fields: dict[str, Any] = {
            "folder": str(self.folder),
            "version": "v1",
            "created": 1_700_000_000,
            "max_model_len": MAX_MODEL_LEN,
            "vocab_size": self.vocab_size,
        }
        return ServedModel(name=name, **(fields | changes))

    def configure(
        self,
        ready: bool = True,
        reason: str = "",
        limits: Limits | None = None,
        retries: RetryRules = RetryRules(),  # noqa: B008
        keeping: KeepRules = KeepRules(),  # noqa: B008
        routes: list[Route] | None = None,
    ) -> None:
        """Send the served models and the settings to the front process. By default, each model is available
        under its own name."""
        models = self.models or [self.served()]
        configure = Configure(
            front="front-0",
            models=models,
            limits=limits or self.limits,
            ready=ready,
            reason=reason,
            retries=retries,
            keeping=keeping,
            routes=[own_route(model, model.name) for model in models] if routes is None else routes,
            serial=self.serial + 1,
        )
        self.serial += 1
        self.call(lambda: self.channel.send(configure))

    def reconfigure(self, **changes: Any) -> None:
        """Call `configure`, and then wait until the front process reports that it has loaded the models."""
        self.configure(**changes)
        self.wait_for(lambda: bool(self.reports) and self.reports[-1].configured == self.serial)

    def identify(self, **changes: Any) -> None:
        """Send the identity table. By default, it contains one key and the uid of this process."""
        table: dict[str, Any] = {
            "keys": {hashlib.sha256(KEY.encode()).hexdigest(): Identity(tenant="acme", key_id="key_1")},
            "uids": {os.getuid(): Identity(tenant="local")},
            "any_uid": None,
        }
        identities = Identities(**(table | changes))
        self.call(lambda: self.channel.send(identities))

    def attach(self, name: str = "demo-0") -> FakeReplica:
        """Attach a new replica to the front process. From now on, the core admits requests to this
        replica."""

        def make() -> FakeReplica:
            ours, theirs = socketpair()
            replica = FakeReplica(name, ours, self.script, self.step_s)
            self.replicas.pop(name, None)
            self.replicas[name] = replica
            self.channel.send(AttachReplica(name), (theirs.fileno(),))
            theirs.close()
            return replica

        return self.call(make)

    def give_back(self) -> HandOver:
        """Take the first connection that the front process handed over, and send it back to the front
        process, just as the core would send it to another front."""

        def give() -> HandOver:
            moved, *descriptors = self.moved.pop(0)
            self.channel.send(ClientConnection(moved.peer, has_request=True), tuple(descriptors))
            for descriptor in descriptors:
                os.close(descriptor)
            return moved

        return self.call(give)

    def send(self, message: Abort | StopFront | Admitted | Preempted) -> None:
        """Send a message from the core to the front process."""
        self.call(lambda: self.channel.send(message))

    # ── start and stop ──

    def start(self) -> Harness:
        """Start the front process and wait until it is ready."""
        self._thread.start()
        self.await_(self._start())
        self.configure()
        self.identify()
        self.attach()
        if not self.ready.wait(60):
            raise TimeoutError("the front did not become ready")
        self.await_(self._listen())
        return self

    async def _start(self) -> None:
        ours, theirs = socketpair()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self.module, "--channel", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()
        self.channel: Channel[FrontToCore] = Channel(ours, FrontToCore)
        self.channel.listen(self._take, self.core_closed.set)

    async def _listen(self) -> None:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(self.api_sock)
        tcp = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        tcp.bind(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        for listener in (unix, tcp):
            listener.listen(512)
            listener.setblocking(False)
            self._listeners.append(listener)
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, address = listener.accept()
                peer = "" if listener.family == socket.AF_UNIX else f"{address[0]}:{address[1]}"
                self.channel.send(ClientConnection(peer), (sock.fileno(),))
                sock.close()

    def _take(self, message: FrontToCore) -> None:
        if isinstance(message, Admit):
            self.admits.append(message)
            if self.admit == "at once":
                turn = Admitted(message.request_id, message.attempt, self.replica.name, "salt", 1)
                self.channel.send(msgspec.structs.replace(turn, **self.turn))
            elif self.admit == "refuse" and self.refusal is not None:
                self.refused.add(message.request_id)
                self.channel.send(
                    msgspec.structs.replace(
                        self.refusal, request_id=message.request_id, attempt=message.attempt
                    )
                )
        elif isinstance(message, Settle):
            self.settles.append(message)
        elif isinstance(message, Claim):
            self.claimed.append(message)
            if self.is_elsewhere:
                self.channel.send(Claimed(message.scope, hand_over=True))
            else:
                self.channel.send(self.claims.claim("front-0", message))
        elif isinstance(message, Release):
            self.claims.release(message.scope)
            self.releases.append(message)
        elif isinstance(message, Retried):
            self.retried.append(message)
        elif isinstance(message, HandOver):
            self.moved.append((message, self.channel.take_fd(), self.channel.take_fd()))
        elif isinstance(message, Keep):
            with open(self.channel.take_fd(), "rb") as memory:
                memory.seek(0)
                self.kept[message.request_id] = msgspec.msgpack.decode(memory.read(), type=list[KeptText])
        elif isinstance(message, Rejected):
            self.rejected.append(message)
        elif isinstance(message, Worked):
            self.worked.append(message)
        elif isinstance(message, NotTaken):
            self.not_taken.append(message)
        elif isinstance(message, FrontReport):
            self.reports.append(message)
        elif isinstance(message, FrontReady):
            self.ready.set()

    def close(self) -> None:
        """Stop the front, the replicas and the loop."""

        def end() -> None:
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())
                listener.close()
            for replica in self.replicas.values():
                replica.die()
            self.channel.close()

        self.call(end)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.api_sock)
