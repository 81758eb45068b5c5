"""Tests of `serve`, `status` and `keys`: their requests to the service and their output."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from appliance.cli.output import cells
from appliance.cli.status import status_lines
from appliance.protocol import Key, ReplicaStatus
from appliance.protocol.status import ClassStatus, Status
from appliance.settings import Flags, load_settings
from engine.rank_messages import LayerExperts
from tests.cli.conftest import Run, a_status, change_replica, on_a_terminal
from tests.cli.servers import AdminService

ROOT = Path(__file__).resolve().parents[2]
NEED_THE_SERVICE = (
    ("status",),
    ("status", "--json"),
    ("keys", "list"),
    ("keys", "create", "--name", "x"),
    ("keys", "revoke", "key_1", "--yes"),
    ("requests", "cancel", "req-1", "--yes"),
)


@pytest.mark.parametrize("words", NEED_THE_SERVICE, ids=" ".join)
def test_without_a_service_a_command_says_how_to_start_one(
    cli: Run, run_dir: Path, words: tuple[str, ...]
) -> None:
    outcome = cli(*words, "--run-dir", run_dir)
    assert outcome.code == 1 and outcome.out == ""
    assert outcome.err == (
        f"appliance: no service is running at {run_dir}/admin.sock: "
        f"start a service with: appliance serve --run-dir {run_dir}\n"
    )


def test_a_socket_without_a_process_does_not_count_as_a_service(cli: Run, run_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(run_dir / "admin.sock"))
    outcome = cli("status", "--run-dir", run_dir)
    assert outcome.code == 1 and "no service is running" in outcome.err


def test_the_run_directory_in_the_settings_file_is_used_although_a_model_is_missing(
    cli: Run, admin: AdminService, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(f'run_dir = "{run_dir}"\n[models.gone]\nfolder = "/no/such/folder"\n')
    monkeypatch.setenv("APPLIANCE_CONFIG", str(config))
    assert cli("status").code == 0


def test_status_as_json_is_the_complete_status_of_the_service(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli("status", "--run-dir", run_dir, "--json")
    assert msgspec.json.decode(outcome.out, type=Status) == admin.status


def test_status_shows_the_most_important_facts(cli: Run, admin: AdminService, run_dir: Path) -> None:
    out = cli("status", "--run-dir", run_dir).out
    for fact in (
        "ready",
        "3 h 12 min",
        "front-0",
        "demo-0",
        "3/64+2",
        "12/3,276",
        "5 of at most 2,048 waiting",
    ):
        assert fact in out
    assert "2 ranks on cpu, float32\n" in out
    assert "4 waiting (120 ms)" in out
    assert "rank 1 was killed by signal 9 (2 times)" in out
    assert "\x1b" not in out


@pytest.mark.parametrize(
    ("weights", "kv_cache_dtype", "shown"),
    [
        ("fp8", "bfloat16", "bfloat16, weights fp8\n"),
        ("bfloat16", "fp8", "bfloat16, KV fp8\n"),
        ("fp8", "fp8", "bfloat16, weights fp8, KV fp8\n"),
    ],
)
def test_status_shows_what_is_quantised(
    cli: Run, admin: AdminService, run_dir: Path, weights: str, kv_cache_dtype: str, shown: str
) -> None:
    change_replica(admin.status, dtype="bfloat16", weights=weights, kv_cache_dtype=kv_cache_dtype)
    assert f"2 ranks on cpu, {shown}" in cli("status", "--run-dir", run_dir).out
    written = json.loads(cli("status", "--run-dir", run_dir, "--json").out)["models"][0]["replicas"][0]
    assert (written["weights"], written["kv_cache_dtype"]) == (weights, kv_cache_dtype)


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ({}, ("-/-", "-/-")),
        ({"step_ms": 8.25, "idle_us": 3.2}, ("8.2/-", "3/-")),
        ({"mixed_step_ms": 99.9, "mixed_idle_us": 120.0}, ("-/99.9", "-/120")),
        (
            {"step_ms": 8.25, "idle_us": 0.0, "mixed_step_ms": 99.9, "mixed_idle_us": 120.0},
            ("8.2/99.9", "0/120"),
        ),
    ],
)
def test_the_status_shows_the_duration_of_both_kinds_of_steps(
    run_dir: Path, steps: dict[str, float], shown: tuple[str, str]
) -> None:
    status = a_status(run_dir)
    change_replica(status, **({"step_ms": 0.0} | steps))
    heading, line = (
        next(line for line in status_lines(status, None) if line.startswith(start))
        for start in ("REPLICA", "demo-0")
    )
    column_ends = [heading.index(title) + len(title) for title in ("STEP ms", "IDLE µs")]
    assert tuple(line[:end].split()[-1] for end in column_ends) == shown


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_of_the_status_is_wider_than_the_terminal(run_dir: Path, width: int) -> None:
    lines = list(status_lines(a_status(run_dir), width))
    assert max(map(cells, lines)) <= width
    assert any("demo-0" in line and "ready" in line for line in lines)


def test_a_failed_model_says_why_once(run_dir: Path) -> None:
    status = a_status(run_dir)
    model, reason = status.models[0], "model-2.safetensors is truncated"
    model.state, model.detail = "failed", reason
    change_replica(status, state="failed", detail="restarts in 4.2 s", last_error=reason)
    text = "\n".join(status_lines(status, None))
    assert (text.count(reason), text.count("restarts in 4.2 s")) == (1, 1)


def test_the_status_shows_how_long_each_class_waits_and_what_an_overload_drops(run_dir: Path) -> None:
    status = a_status(run_dir)
    status.queue.classes = [
        ClassStatus(name="P0", waiting=0, oldest_wait_s=0.0, expected_wait_s=0.0, target_s=0.1),
        ClassStatus(name="P1", waiting=4, oldest_wait_s=12.0, expected_wait_s=14.0, target_s=1.0),
        ClassStatus(name="P3", waiting=1, oldest_wait_s=70.0, expected_wait_s=90.0, target_s=None),
    ]
    status.queue.preemptions = 3
    status.queue.overload = "demo: P1 requests would wait 14.0 s, more than 10 s: new P3 requests are refused"
    text = "\n".join(status_lines(status, None))
    assert "37 ended · 3 preempted" in text

    assert "P1  4 waiting, the oldest for 12 s; expected wait for new requests 14 s (target 1.0 s)" in text
    assert "P3  1 waiting, the oldest for 1 min 10 s; expected wait for new requests 1 min 30 s\n" in text
    assert "P0  " not in text
    assert status.queue.overload in text
    status.queue.classes[1].expected_wait_s = None
    assert "expected wait for new requests unknown (target 1.0 s)" in "\n".join(status_lines(status, None))


def test_the_status_names_the_busiest_expert(run_dir: Path) -> None:
    status = a_status(run_dir)
    model = status.models[0]
    assert "expert" not in "\n".join(status_lines(status, None))
    layers = (
        LayerExperts(layer=0, experts=4, choices=800, busiest=3, busiest_choices=200, unused=0),
        LayerExperts(layer=2, experts=4, choices=800, busiest=1, busiest_choices=500, unused=1),
        LayerExperts(layer=3, experts=4, choices=0, busiest=0, busiest_choices=0, unused=4),
    )
    model.replicas[0] = msgspec.structs.replace(model.replicas[0], expert_layers=layers)
    assert (
        "demo-0: expert 1 in layer 2 is chosen 2.5 times as often as the average expert in that layer; "
        "1 of 8 experts have not been chosen (1,600 choices across all layers)"
        in "\n".join(status_lines(status, None))
    )


def test_names_chosen_by_others_cannot_control_the_terminal(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    admin.status.models[0].name = "de\x1b]0;owned\x07mo"
    admin.status.problems[0].description = "line\r\n\x1b[2Jbreak"
    out = cli("status", "--run-dir", run_dir).out
    assert not set(out) & {"\x1b", "\x07", "\r"}


def test_only_the_new_key_is_printed_so_that_a_script_can_use_it(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli("keys", "create", "--name", "ci", "--run-dir", run_dir)
    assert outcome.out == "ak-secret\n"
    assert "shown only once" in outcome.err and "key_1" in outcome.err
    assert admin.actions == [("keys.create", {"name": "ci", "tenant": "default"})]


def test_a_new_key_as_json_has_its_id_and_secret(cli: Run, admin: AdminService, run_dir: Path) -> None:
    outcome = cli("keys", "create", "--name", "ci", "--tenant", "t", "--json", "--run-dir", run_dir)
    made = json.loads(outcome.out)
    assert (made["id"], made["key"], made["tenant"]) == ("key_1", "ak-secret", "t")
    assert outcome.err == ""


def test_a_key_can_expire_after_a_span_or_at_a_date(cli: Run, admin: AdminService, run_dir: Path) -> None:
    before = time.time()
    cli("keys", "create", "--name", "a", "--expires", "90d", "--run-dir", run_dir)
    after = time.time()
    cli("keys", "create", "--name", "b", "--expires", "2099-01-01", "--run-dir", run_dir)
    span, date = (parameters["expires_at"] for _, parameters in admin.actions)
    assert before <= span - 90 * 86400 <= after
    assert time.strftime("%Y-%m-%d", time.localtime(date)) == "2099-01-01"
    outcome = cli("keys", "create", "--name", "c", "--expires", "soon", "--run-dir", run_dir)
    assert outcome.code == 2 and "'soon'" in outcome.err and "90d" in outcome.err


def test_keys_are_listed_with_their_state(cli: Run, admin: AdminService, run_dir: Path) -> None:
    def key(name: str, **times: float) -> Key:
        return Key(id=f"key_{name}", name=name, tenant="t", prefix="ak-abcde", created_at=1.79e9, **times)

    admin.keys = [key("good"), key("old", expires_at=1.7e9), key("gone", revoked_at=1.79e9)]
    lines = cli("keys", "list", "--run-dir", run_dir).out.splitlines()
    assert [line.split()[0] for line in lines] == ["ID", "key_good", "key_old", "key_gone"]
    assert lines[1].endswith("valid") and " expired " in lines[2] and " revoked " in lines[3]
    listed = json.loads(cli("keys", "list", "--json", "--run-dir", run_dir).out)
    assert [each["id"] for each in listed] == ["key_good", "key_old", "key_gone"]


def test_a_refusal_by_the_service_is_reported_in_one_line(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli("keys", "revoke", "key_0", "--yes", "--run-dir", run_dir)
    assert (outcome.code, outcome.err) == (1, "appliance: no key has id 'key_0'\n")


@pytest.mark.parametrize(
    "words",
    [("keys", "create", "--name"), ("keys", "revoke", "--yes"), ("requests", "cancel", "--yes")],
    ids=" ".join,
)
def test_an_argument_that_is_not_valid_text_is_refused_in_one_line(
    cli: Run, admin: AdminService, run_dir: Path, words: tuple[str, ...]
) -> None:
    outcome = cli(*words, os.fsdecode(b"caf\xe9"), "--run-dir", run_dir)
    assert outcome.code == 1 and "'caf\\udce9' is not UTF-8 text" in outcome.err
    assert admin.actions == []


def test_a_pipe_closed_early_causes_no_traceback(admin: AdminService, run_dir: Path) -> None:
    admin.keys = [
        Key(id=f"key_{number}", name="n" * 40, tenant="t", prefix="ak-", created_at=1.79e9)
        for number in range(4000)
    ]
    command = f"{sys.executable} -m appliance.cli keys list --run-dir {run_dir} | head -n 1"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("ID") and done.stderr == ""


def test_closed_standard_output_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "appliance.cli", "--version"]
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr == "appliance: cannot write the output: No space left on device\n"


def test_colour_is_used_on_a_terminal_unless_no_color_is_set(admin: AdminService, run_dir: Path) -> None:
    plain = on_a_terminal("status", "--run-dir", str(run_dir), NO_COLOR="1")
    painted = on_a_terminal("status", "--run-dir", str(run_dir))
    assert "\x1b[32mready\x1b[0m" in painted
    assert "\x1b" not in plain and "ready" in plain


def test_the_options_of_serve_reach_the_core(
    cli: Run, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Flags] = []
    monkeypatch.setattr("appliance.core.process.run", lambda flags: started.append(flags) or 0)
    outcome = cli(
        *("serve", "--model", f"a={tmp_path}", "--model", f"b={run_dir}", "--listen", "127.0.0.1:8080"),
        *("--run-dir", run_dir, "--state-dir", tmp_path, "--fronts", 2, "--device", "cpu"),
        *("--dtype", "bfloat16", "--load-format", "dummy", "--tensor-parallel-size", 2, "--max-num-seqs", 8),
        *("--quantization", "fp8", "--kv-cache-dtype", "fp8", "--replicas", 3),
        *("--max-num-batched-tokens", 256, "--kv-blocks", 99, "--max-model-len", 512, "--log-level", "debug"),
    )
    assert outcome.code == 0
    (flags,) = started
    settings = load_settings(flags)
    assert (settings.listen, settings.fronts, settings.log_level) == ("127.0.0.1:8080", 2, "debug")
    assert {name: model.folder for name, model in settings.models.items()} == {
        "a": str(tmp_path),
        "b": str(run_dir),
    }
    for model in settings.models.values():
        assert (model.device, model.dtype, model.load_format) == ("cpu", "bfloat16", "dummy")
        spec = model.spec("a-0")
        assert (spec.dtype, spec.quantization, spec.kv_cache_dtype) == ("bfloat16", "fp8", "fp8")
        assert (model.tensor_parallel_size, model.max_num_seqs, model.max_num_batched_tokens) == (2, 8, 256)
        assert (model.kv_blocks, model.max_model_len, model.replicas) == (99, 512, 3)


def test_invalid_settings_are_reported_in_one_line(cli: Run) -> None:
    outcome = cli("serve", "--model", "a=/no/such/folder")
    # Exit code 78 is EX_CONFIG, which tells a service manager not to restart the service.
    assert outcome.code == 78 and "/no/such/folder" in outcome.err and "Traceback" not in outcome.err
    assert len(outcome.err.splitlines()) == 1


def test_the_progress_of_a_load_is_the_progress_of_the_models_replicas(
    cli: Run, admin: AdminService, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    @contextmanager
    def record(replicas: Callable[[], list[ReplicaStatus]]) -> Iterator[None]:
        shown.extend(replica.name for replica in replicas())
        yield

    monkeypatch.setattr("appliance.cli.actions.loads_shown", record)
    cli("models", "load", "demo@1", "--run-dir", run_dir)
    cli("models", "load", "other", "--run-dir", run_dir)
    assert shown == ["demo-0"]
