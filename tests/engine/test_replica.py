"""Tests with real replica processes: outputs, counts, credits, and killed ranks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine import launch
from engine.child_log import child_records
from engine.client import ReplicaGroup
from engine.messages import ReplicaInfo, ReplicaSpec, SamplingParams, Submit, pack_tokens
from engine.rank_messages import Fatal, Finished, RankOutbound, Ready, Report
from engine.wire import socketpair
from tests.engine.streaming_client import ReplicaDisconnectedError, StreamingClient
from tests.forked import forked_ranks

pytestmark = pytest.mark.system

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}

LONG: dict[str, Any] = {"kv_blocks": 1300, "max_model_len": 16_384}
"""Fields of a replica that has room for five requests of `LONG_TOKENS` tokens."""
LONG_TOKENS = 16_000
"""Length of an answer that is still being generated after the test has been paused for several seconds."""


class Watched:
    """A replica, with all messages that it has sent."""

    def __init__(self) -> None:
        self.info: asyncio.Future[ReplicaInfo] = asyncio.get_running_loop().create_future()
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.reports: list[Report] = []
        self.fatal: list[Fatal] = []
        self.group: ReplicaGroup

    def on_message(self, rank: int, message: RankOutbound) -> None:
        match message:
            case Ready(info):
                self.info.set_result(info)
            case Report():
                self.reports.append(message)
            case Fatal():
                self.fatal.append(message)

    def client(self, front: str, disconnected: list[list[int]] | None = None) -> StreamingClient:
        on_disconnect = (lambda handles: None) if disconnected is None else disconnected.append
        return StreamingClient(socket.socket(fileno=self.group.attach_front(front)), on_disconnect)

    def finished(self) -> list[Finished]:
        return [entry for report in self.reports for entry in report.finished]

    async def settled(self, submissions: int) -> Report:
        """Wait for a report that shows that all credit has been returned."""
        async with asyncio.timeout(60):
            while not self.reports or len(self.finished()) < submissions or self.reports[-1].running:
                await asyncio.sleep(0.01)
        return self.reports[-1]


@asynccontextmanager
async def replica(folder: Path, **fields: object) -> AsyncIterator[Watched]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    spec = ReplicaSpec(
        replica="test-0",
        model_path=str(folder),
        load_format="dummy",
        device="cpu",
        **{"kv_blocks": 64, "max_model_len": 512, "max_num_seqs": 16, "threads": 1, **fields},  # type: ignore[arg-type]
    )
    watched = Watched()
    with forked_ranks():
        watched.group = ReplicaGroup.launch(
            spec, watched.on_message, lambda reason: watched.end.set_result(reason)
        )
    try:
        async with asyncio.timeout(240):
            await asyncio.wait({watched.info, watched.end}, return_when=asyncio.FIRST_COMPLETED)
        yield watched
    finally:
        if not watched.end.done():
            await watched.group.stop()


def ask(client: StreamingClient, name: str, prompt: int = 40, most: int = 12, n: int = 1) -> Submit:
    return Submit(
        handle=client.next_handle(),
        request_id=name,
        prompt=pack_tokens([(7 * place) % 500 + 3 for place in range(prompt)]),
        n=n,
        sampling=SamplingParams(max_tokens=most, temperature=0.8 if n > 1 else 0.0, seed=11),
    )


async def collect(client: StreamingClient, submit: Submit) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for output in client.generate(submit):
        tokens.setdefault(output.sample, []).extend(output.token_ids)
    return tokens


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_two_and_four_ranks_generate_the_same_tokens_as_one(tmp_path: Path) -> None:
    async def tokens(size: int) -> list[dict[int, list[int]]]:
        async with replica(tmp_path, tensor_parallel_size=size) as watched:
            client = watched.client("front-0")
            submits = [ask(client, f"r{i}", prompt=30 + 20 * i) for i in range(3)]
            penalised = ask(client, "samples", n=3)
            sampling = msgspec.structs.replace(penalised.sampling, frequency_penalty=0.5)
            submits.append(msgspec.structs.replace(penalised, sampling=sampling))
            return await asyncio.gather(*(collect(client, submit) for submit in submits))

    one, two, four = (asyncio.run(tokens(size)) for size in (1, 2, 4))
    assert one == two == four


def test_a_plan_larger_than_the_socket_buffer_does_not_deadlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def narrow() -> tuple[socket.socket, socket.socket]:
        pair = socketpair()
        for end in pair:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        return pair

    monkeypatch.setattr(launch, "socketpair", narrow)

    async def scenario() -> None:
        async with replica(tmp_path, tensor_parallel_size=2, overlap=False) as watched:
            client = watched.client("front-0")
            submit = ask(client, "r", most=3)
            # These stop tokens are never sampled. They only make the plan larger than the socket's buffer.
            stops = msgspec.structs.replace(
                submit.sampling, stop_token_ids=(500,) * 2_000_000, ignore_eos=True
            )
            async with asyncio.timeout(120):
                tokens = await collect(client, msgspec.structs.replace(submit, sampling=stops))
            assert len(tokens[0]) == 3

    asyncio.run(scenario())


def test_all_credit_is_granted_back_and_every_token_counted_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica(tmp_path) as watched:
            client = watched.client("front-0")
            before = await watched.settled(0)
            await asyncio.gather(
                *(collect(client, ask(client, f"r{i}", n=1 + i % 3, most=5)) for i in range(20))
            )
            after = await watched.settled(20)
            rows = sum(1 + i % 3 for i in range(20))
            assert after.credit_seqs - before.credit_seqs == rows
            assert after.credit_tokens - before.credit_tokens == 20 * 40
            assert after.blocks_used == 0
            assert sorted(entry.request_id for entry in watched.finished()) == sorted(
                f"r{i}" for i in range(20)
            )
            assert sum(entry.generated_tokens for entry in watched.finished()) == 5 * rows

    asyncio.run(scenario())


def test_requests_of_a_dead_front_are_cancelled_and_others_continue(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica(tmp_path, **LONG) as watched:
            dying, living = watched.client("front-0"), watched.client("front-1")
            for i in range(4):
                dying.submit(ask(dying, f"dead{i}", most=LONG_TOKENS), lambda output: None)
            going = asyncio.create_task(collect(living, ask(living, "alive", most=60)))
            while not any(report.running >= 4 for report in watched.reports):
                await asyncio.sleep(0.01)
            dying.close()
            assert len((await going)[0]) == 60
            report = await watched.settled(5)
            assert [name for r in watched.reports for name in r.disconnected_fronts] == ["front-0"]
            assert report.blocks_used == 0
            dead = [entry for entry in watched.finished() if entry.request_id.startswith("dead")]
            assert [entry.finish_reason for entry in dead] == [["cancelled"]] * 4

    asyncio.run(scenario())


@pytest.mark.parametrize("victim", [0, 1])
def test_if_one_rank_dies_the_whole_group_ends(tmp_path: Path, victim: int) -> None:
    async def scenario() -> None:
        async with replica(tmp_path, tensor_parallel_size=2, **LONG) as watched:
            disconnected: list[list[int]] = []
            client = watched.client("front-0", disconnected)
            running = asyncio.create_task(collect(client, ask(client, "r", most=LONG_TOKENS)))
            while not any(report.running for report in watched.reports):
                await asyncio.sleep(0.01)
            os.kill(watched.group.pids[victim], signal.SIGKILL)
            async with asyncio.timeout(60):  # a collective would time out only after several minutes
                reason = await watched.end
            assert reason.startswith(f"rank {victim} ")
            assert "SIGKILL" in reason
            assert not any(alive(pid) for pid in watched.group.pids)
            with pytest.raises(ReplicaDisconnectedError):
                await running
            assert disconnected == [[1]]

    asyncio.run(scenario())


def test_the_reason_names_the_killed_rank_even_if_the_exit_of_its_peer_is_seen_first(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica(tmp_path, tensor_parallel_size=2, **LONG) as watched:
            client = watched.client("front-0")
            running = asyncio.create_task(collect(client, ask(client, "r", most=LONG_TOKENS)))
            while not any(report.running for report in watched.reports):
                await asyncio.sleep(0.01)
            leader, victim = watched.group.pids
            os.kill(victim, signal.SIGKILL)
            # Let both ranks exit before the replica handles their exits.
            until = time.monotonic() + 60
            while Path(f"/proc/{leader}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                assert time.monotonic() < until
                time.sleep(0.01)
            watched.group._exited(watched.group._ranks[0])
            assert (await watched.end).startswith(f"rank 1 (pid {victim}) was killed by SIGKILL")
            with pytest.raises(ReplicaDisconnectedError):
                await running

    asyncio.run(scenario())


def test_a_folder_without_a_checkpoint_is_refused_with_the_reason(tmp_path: Path) -> None:
    async def scenario() -> None:
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        spec = ReplicaSpec(replica="bad-0", model_path=str(tmp_path), device="cpu", kv_blocks=8)
        watched = Watched()
        watched.group = ReplicaGroup.launch(spec, watched.on_message, watched.end.set_result)
        async with asyncio.timeout(240):
            reason = await watched.end
        assert "exited with code 1" in reason
        assert [fatal.kind for fatal in watched.fatal] == ["checkpoint"]
        assert str(tmp_path) in watched.fatal[0].message

    asyncio.run(scenario())


def test_a_rank_that_cannot_decode_its_start_message_names_the_field(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        spec = ReplicaSpec(replica="bad-0", model_path=str(tmp_path), threads="two")  # type: ignore[arg-type]
        watched = Watched()
        watched.group = ReplicaGroup.launch(spec, watched.on_message, watched.end.set_result)
        async with asyncio.timeout(240):
            assert "exited with code 1" in await watched.end

    asyncio.run(scenario())
    assert "the core sent an invalid message: Expected `int | null`, got `str` - at `$.spec.threads`" in (
        capfd.readouterr().err
    )


BREAKS = """
import sys
import engine.device, engine.replica, engine.runner
from engine.config import CheckpointError
from engine.memory import PoolTooSmall
error = {error}

def refuse(*arguments):
    raise error

engine.runner.ModelRunner.__init__ = refuse
engine.replica.main()
"""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("CheckpointError('config.json is bad', 'copy it again')", "checkpoint"),
        ("engine.device.DeviceError('no GPU')", "device"),
        ("PoolTooSmall('3 blocks')", "memory"),
        ("KeyError('layer')", "internal"),
    ],
)
def test_only_unexpected_errors_are_logged_with_time_name_and_traceback(
    error: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "breaking_replica.py").write_text(BREAKS.replace("{error}", error))
    monkeypatch.syspath_prepend(tmp_path)
    copied = BufferingHandler(10)
    child_records.addHandler(copied)

    async def scenario() -> list[Fatal]:
        spec = ReplicaSpec(replica="bad-0", model_path=str(tmp_path), device="cpu", kv_blocks=8)
        watched = Watched()
        with forked_ranks():
            watched.group = ReplicaGroup.launch(
                spec, watched.on_message, watched.end.set_result, module="breaking_replica"
            )
        async with asyncio.timeout(240):
            await watched.end
        return watched.fatal

    try:
        (fatal,) = asyncio.run(scenario())
    finally:
        child_records.removeHandler(copied)
    assert fatal.kind == kind
    said = capfd.readouterr().err
    if kind == "internal":
        first, *rest = said.splitlines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR   bad-0: the engine failed", first)
        assert rest[0].startswith("Traceback") and rest[-1] == "KeyError: 'layer'"
        (record,) = copied.buffer
        assert (record.__dict__["process_name"], record.levelname) == ("bad-0", "ERROR")
        assert record.getMessage().splitlines()[0] == "the engine failed"
        assert record.getMessage().endswith("KeyError: 'layer'")
    else:
        assert said == "" and not copied.buffer


RETURNS = """
from pathlib import Path
from types import SimpleNamespace
import torch
import engine.replica

runner = SimpleNamespace(device=torch.device("{device}"), ranks=None)
engine.replica.build_runner = lambda *arguments: runner
engine.replica.return_memory_periodically = Path(__file__).with_name("returns").touch
engine.replica._serve = lambda *arguments: 0
engine.replica.main()
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_only_ranks_on_a_cpu_return_memory_periodically(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "returning_replica.py").write_text(RETURNS.replace("{device}", device))
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario() -> None:
        spec = ReplicaSpec(replica="test-0", model_path=str(tmp_path))
        watched = Watched()
        with forked_ranks():
            watched.group = ReplicaGroup.launch(
                spec, watched.on_message, watched.end.set_result, module="returning_replica"
            )
        async with asyncio.timeout(240):
            reason = await watched.end
        assert watched.fatal == [], reason

    asyncio.run(scenario())
    assert (tmp_path / "returns").exists() == (device == "cpu")


def test_a_rank_sees_only_the_gpus_of_its_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seeing.py").write_text(
        "import os, pathlib\n"
        "seen = os.environ.get('CUDA_VISIBLE_DEVICES', 'all')\n"
        "pathlib.Path(__file__).with_name('seen').write_text(seen)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for gpus, seen in (((), "all"), (("GPU-3", "GPU-5"), "GPU-3,GPU-5")):
        process, channel = launch.spawn_rank("seeing", gpus)
        assert process.wait(60) == 0
        channel.close()
        assert (tmp_path / "seen").read_text() == seen


@pytest.mark.parametrize("possible", [0, 1])
def test_a_group_whose_ranks_cannot_all_be_started_reports_no_end_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, possible: int
) -> None:
    spawn, started, reasons = launch.spawn_rank, list[Any](), list[str]()

    def spawn_one(module: str, *arguments: Any) -> Any:
        if len(started) == possible:
            raise OSError("too many open files")
        started.append(spawn(module, *arguments))
        return started[-1]

    monkeypatch.setattr(launch, "spawn_rank", spawn_one)
    (tmp_path / "ranks").mkdir()
    spec = ReplicaSpec(
        replica="m-0", model_path="/", tensor_parallel_size=2, rendezvous=str(tmp_path / "ranks" / "store")
    )

    async def scenario() -> None:
        with pytest.raises(OSError, match="too many open files"):
            ReplicaGroup.launch(spec, lambda rank, message: None, reasons.append)
        async with asyncio.timeout(60):
            while any(alive(process.pid) for process, _ in started) or (tmp_path / "ranks").exists():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert reasons == [], "the caller already knows from the exception"

    asyncio.run(scenario())


def test_nothing_is_imported_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator's working directory may contain a folder `engine/` or a file `random.py`. The replica must
    not import them."""
    (tmp_path / "engine").mkdir()
    for name in ("engine/__init__.py", "random.py"):
        (tmp_path / name).write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path)

    async def scenario() -> None:
        spec = ReplicaSpec(replica="bad-0", model_path=str(tmp_path), device="cpu", kv_blocks=8)
        watched = Watched()
        watched.group = ReplicaGroup.launch(spec, watched.on_message, watched.end.set_result)
        async with asyncio.timeout(240):
            reason = await watched.end
        assert [fatal.kind for fatal in watched.fatal] == ["checkpoint"], reason

    asyncio.run(scenario())


def test_a_replica_that_is_stopped_while_it_starts_exits(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec = ReplicaSpec(replica="m-0", model_path=str(tmp_path), load_format="dummy", device="cpu", threads=1)

    async def scenario() -> None:
        watched = Watched()
        with forked_ranks():
            group = ReplicaGroup.launch(spec, watched.on_message, watched.end.set_result)
        async with asyncio.timeout(60):
            await group.stop(600.0)
        assert watched.end.result() == "stopped" and not watched.fatal

    asyncio.run(scenario())


def test_ranks_ignore_sigint_and_sigterm(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with replica(tmp_path, tensor_parallel_size=2) as watched:
            for pid in watched.group.pids:
                for number in (signal.SIGINT, signal.SIGTERM):
                    os.kill(pid, number)
            client = watched.client("front")
            outputs = [output async for output in client.generate(ask(client, "after"))]
            assert outputs[-1].finish_reason == "length"
            assert not watched.end.done()

    asyncio.run(scenario())
