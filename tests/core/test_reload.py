"""Tests that reloading a running service's settings applies the changes and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from appliance.actions.parameters import DrainService, ReloadConfig, ResumeService
from appliance.client import AdminError
from appliance.core.reload import APPLIED_HERE, AT_RESTART, LiveSettings, Reloader, check_still_there
from appliance.core.reload_hooks import reload_hooks
from appliance.protocol import Reloaded, ReplicaStatus
from appliance.settings import Loaded, Settings, SettingsError
from store.models import Registry
from tests.core.conftest import Service, read_answer
from tests.ports import free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


def change(service: Service, *changes: tuple[str, str]) -> Reloaded:
    """Replace the given parts of the settings file, and reload it."""
    text = service.config.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    service.config.write_text(text)
    return reload(service)


def reload(service: Service) -> Reloaded:
    reloaded = service.admin.act(ReloadConfig())
    assert isinstance(reloaded, Reloaded)
    return reloaded


def replicas(service: Service, model: str = "m") -> list[ReplicaStatus]:
    return next((found.replicas for found in service.admin.status().models if found.name == model), [])


def names(service: Service, model: str = "m") -> list[tuple[str, str]]:
    return [(replica.name, replica.state) for replica in replicas(service, model)]


def test_every_setting_has_a_reload_hook() -> None:
    fields = {field.name for field in msgspec.structs.fields(Settings)} - {"config_file"}
    applied = reload_hooks(None, None, None, None, None, None, None, None).keys()  # type: ignore[arg-type]
    assert fields == AT_RESTART | APPLIED_HERE | applied
    assert len(fields) == len(AT_RESTART) + len(APPLIED_HERE) + len(applied)


def test_settings_of_the_service_are_applied_without_restarting_a_process(make_service: Make) -> None:
    service = make_service(models=("m", "n")).start_and_wait()
    pids = service.pids()
    service.config.write_text(
        f'run_dir = "{service.run_dir}"\nstate_dir = "/elsewhere"\ndrain_grace_s = 3\nlog_level = "debug"\n'
        "[queue]\nlimit = 7\n[limits]\nmax_body_bytes = 99\n[idempotency]\nkeep_s = 1.5\n"
        '[unix]\nuids = "any"\napi_mode = "0666"\nadmin_mode = "0600"\n'
        '[models.m]\nfolder = "m"\n[models.n]\nfolder = "n"\n'
    )
    reloaded = reload(service)
    assert reloaded.changed == [
        "drain_grace_s: 10.0 → 3.0",
        "idempotency.keep_s: 600.0 → 1.5",
        "limits.max_body_bytes: 2097152 → 99",
        'log_level: "info" → "debug"',
        "queue.limit: 2048 → 7",
        'unix.admin_mode: "0660" → "0600"',
        'unix.api_mode: "0660" → "0666"',
        'unix.uids: "owner" → "any"',
    ]
    assert reloaded.models == []
    assert reloaded.at_restart == [f'state_dir: "{service.state_dir}" → "/elsewhere"']
    assert service.pids() == pids
    assert service.admin.status().queue.limit == 7
    modes = [(service.run_dir / name).stat().st_mode & 0o777 for name in ("api.sock", "admin.sock")]
    assert modes == [0o666, 0o600]
    shown = service.admin.configuration()
    assert (shown.settings["state_dir"], shown.places["state_dir"]) == (
        str(service.state_dir),
        f"{service.config}:2",
    )
    assert (shown.settings["queue"]["limit"], shown.places["queue.limit"]) == (7, f"{service.config}:6")
    # A change that requires a restart is reported until the service restarts.
    assert reload(service).at_restart == reloaded.at_restart


def test_only_a_changed_model_is_replaced_and_it_serves_until_then(
    make_service: Make,
) -> None:
    service = make_service("drain_grace_s = 600", models=("m", "n")).start_and_wait()
    before = {model: replicas(service, model)[0].pids for model in ("m", "n")}
    stream = service.connect("m 150")
    reloaded = change(service, ('folder = "m"', 'folder = "m"\nmax_num_seqs = 5'))
    assert reloaded.changed == ["models.m.max_num_seqs: 64 → 5"]
    assert reloaded.models == ["model m: its replicas are being replaced one by one"]
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"
    assert read_answer(stream) == [str(token) for token in range(1, 151)] + ["front-0 length"]
    wait_until(lambda: names(service) == [("m-1", "ready")], description="the successor")
    assert replicas(service)[0].pids != before["m"] and replicas(service)[0].max_num_seqs == 5
    assert replicas(service, "n")[0].pids == before["n"]
    wait_until(lambda: all(row.state == "ended" for row in service.rows()))
    assert {(row.status, row.resubmissions) for row in service.rows()} == {(200, 0)}


def test_models_are_added_and_removed_and_requests_of_removed_ones_finish(make_service: Make) -> None:
    service = make_service("drain_grace_s = 60", models=("m", "n")).start_and_wait()
    kept = replicas(service)[0].pids
    stream = service.connect("n 100")
    wait_until(lambda: len(service.rows()) == 1)
    (service.folder / "new").mkdir()
    (service.folder / "new" / "config.json").write_text('{"vocab_size": 10}')
    reloaded = change(service, ('[models.n]\nfolder = "n"', '[models.new]\nfolder = "new"'))
    assert reloaded.changed == [
        f'models.n.folder: "{service.folder}/n" → unset',
        f'models.new.folder: unset → "{service.folder}/new"',
    ]
    assert reloaded.models == [
        "model n: is being removed; its requests have 60 s to finish",
        "model new: is being added with 1 replica",
    ]
    wait_until(lambda: names(service, "new") == [("new-0", "ready")])
    assert read_answer(service.connect("new 2"))[-1] == "front-0 length"
    assert "refused" in read_answer(service.connect("n 2"))[-1]
    assert read_answer(stream)[-1] == "front-0 length"
    wait_until(lambda: len(service.pids()) == 3, description="the end of the removed model's replica")
    removed = "front-0 refused 404 there is no model 'n'; available models: m, new"
    wait_until(lambda: read_answer(service.connect("n 2")) == [removed])
    assert replicas(service)[0].pids == kept


def test_replicas_are_added_and_removed_and_the_first_one_stays(make_service: Make) -> None:
    service = make_service().start_and_wait()
    kept = replicas(service)[0].pids
    assert change(service, ('folder = "m"', 'folder = "m"\nreplicas = 3')).models == [
        "model m: 1 → 3 replicas"
    ]
    wait_until(lambda: names(service) == [("m-0", "ready"), ("m-1", "ready"), ("m-2", "ready")])
    change(service, ("replicas = 3", "replicas = 1"))
    wait_until(lambda: names(service) == [("m-0", "ready")])
    assert replicas(service)[0].pids == kept


def test_a_replica_that_is_being_stopped_leaves_the_service_ready(make_service: Make) -> None:
    service = make_service("drain_grace_s = 600").start_and_wait()
    change(service, ('folder = "m"', 'folder = "m"\nreplicas = 2'))
    wait_until(lambda: names(service) == [("m-0", "ready"), ("m-1", "ready")])
    streams = []

    def run_requests() -> bool:
        # A replica gets no request before the core has read its first report.
        streams.append(service.connect("m 100000"))
        time.sleep(0.5)
        return all(one.running for one in replicas(service))

    wait_until(run_requests, description="a request on each replica")
    change(service, ("replicas = 2", "replicas = 1"))
    wait_until(lambda: names(service) == [("m-0", "ready"), ("m-1", "draining")])
    assert service.state() == "ready"
    for request in service.admin.in_flight():
        service.admin.cancel_request(request.request_id)
    wait_until(lambda: names(service) == [("m-0", "ready")])
    assert service.state() == "ready"
    for stream in streams:
        stream.close()


def test_of_two_overlapping_changes_the_last_one_takes_effect(make_service: Make) -> None:
    service = make_service("drain_grace_s = 60").start_and_wait()
    stream = service.connect("m 100")
    wait_until(lambda: len(service.rows()) == 1)
    for rows in (5, 6, 7):
        change(service, ('folder = "m"', f'folder = "m"\nmax_num_seqs = {rows}'))
        service.config.write_text(service.config.read_text().replace(f"\nmax_num_seqs = {rows}", ""))
    assert change(service, ('[models.m]\nfolder = "m"', "[models]")).models == [
        "model m: is being removed; its requests have 60 s to finish"
    ]
    change(service, ("[models]", '[models.m]\nfolder = "m"\nmax_num_seqs = 8'))
    assert read_answer(stream)[-1] == "front-0 length"
    wait_until(lambda: [replica.max_num_seqs for replica in replicas(service)] == [8])
    wait_until(lambda: len(service.pids()) == 2, description="the end of every other replica")
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"


def test_a_model_with_settings_that_cannot_be_loaded_keeps_the_former_ones(
    make_service: Make,
) -> None:
    service = make_service().start_and_wait()
    kept = replicas(service)[0].pids
    bad = service.folder / "bad"
    bad.mkdir()
    (bad / "config.json").write_text("{}")
    (bad / "fake.json").write_text('{"fatal": ["checkpoint", "model.safetensors is missing"]}')
    change(service, ('folder = "m"', 'folder = "bad"'))
    wait_until(
        lambda: any("m-0 keeps running" in problem.description for problem in service.admin.status().problems)
    )
    wait_until(lambda: names(service) == [("m-0", "ready")])
    assert replicas(service)[0].pids == kept
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"
    (bad / "fake.json").unlink()
    assert reload(service).models == ["model m: retrying the settings that previously failed to load"]
    wait_until(lambda: names(service) == [("m-2", "ready")])
    assert service.admin.status().models[0].folder == str(bad)


def test_the_address_can_change_and_connections_continue(make_service: Make) -> None:
    port, other = free_port(), free_port()
    service = make_service(f'listen = "127.0.0.1:{port}"').start_and_wait()
    stream = service.connect("m 80", ("127.0.0.1", port))
    wait_until(lambda: len(service.rows()) == 1)
    change(service, (f"127.0.0.1:{port}", f"127.0.0.1:{other}"))
    assert read_answer(service.connect("m 2", ("127.0.0.1", other)))[-1] == "front-0 length"
    with pytest.raises(ConnectionRefusedError):
        service.connect("m 2", ("127.0.0.1", port))
    assert read_answer(stream)[-1] == "front-0 length"
    # First change to an address that includes the previous one, and then change back.
    change(service, (f"127.0.0.1:{other}", f"0.0.0.0:{other}"))
    assert read_answer(service.connect("m 2", ("127.0.0.2", other)))[-1] == "front-0 length"
    change(service, (f"0.0.0.0:{other}", f"127.0.0.1:{other}"))
    with pytest.raises(ConnectionRefusedError):
        service.connect("m 2", ("127.0.0.2", other))
    assert [sock.name for sock in service.admin.status().sockets] == ["api", "tcp", "admin"]
    change(service, (f'listen = "127.0.0.1:{other}"', ""))
    assert [sock.name for sock in service.admin.status().sockets] == ["api", "admin"]


def test_fronts_are_added_and_surplus_fronts_finish_their_requests(make_service: Make) -> None:
    service = make_service("fronts = 1\ndrain_grace_s = 600").start_and_wait()
    first = service.admin.status().fronts[0].pid
    change(service, ("fronts = 1", "fronts = 3"))
    wait_until(lambda: [front.state for front in service.admin.status().fronts] == ["ready"] * 3)
    streams = [service.connect("m 100") for _ in range(3)]
    wait_until(lambda: len(service.rows()) == 3)
    change(service, ("fronts = 3", "fronts = 1"))
    answers = [read_answer(stream)[-1] for stream in streams]
    assert sorted(answers) == ["front-0 length", "front-1 length", "front-2 length"]
    wait_until(lambda: len(service.admin.status().fronts) == 1)
    assert service.admin.status().fronts[0].pid == first
    assert read_answer(service.connect("m 2"))[-1] == "front-0 length"
    change(service, ("fronts = 1", "fronts = 2"))
    wait_until(lambda: [front.state for front in service.admin.status().fronts] == ["ready"] * 2)
    answers = [read_answer(service.connect("m 2"))[-1] for _ in range(2)]
    # While replicas may still send messages about a stopped front, the core does not reuse the front's name.
    assert sorted(answers) == ["front-0 length", "front-3 length"]


def test_a_surplus_front_that_hangs_is_killed(make_service: Make) -> None:
    service = make_service("fronts = 2\nhang_timeout_s = 600\ndrain_grace_s = 600").start_and_wait()
    streams = [service.connect("m 100000") for _ in range(2)]
    wait_until(lambda: len(service.rows()) == 2)
    change(service, ("fronts = 2", "fronts = 1"))
    leaving = service.admin.status().fronts[1]
    assert leaving.state == "stopping" and leaving.pid is not None
    os.kill(leaving.pid, signal.SIGSTOP)
    service.set_timeout("hang_timeout_s", 2)
    wait_until(lambda: [front.name for front in service.admin.status().fronts] == ["front-0"])
    (problem,) = (one for one in service.admin.status().problems if one.where == "front-1")
    assert "sent no message for" in problem.description and "while stopping" in problem.description
    for stream in streams:
        stream.close()


def test_unusable_settings_change_nothing_and_the_error_names_the_line(make_service: Make) -> None:
    service = make_service("# here").start_and_wait()
    good, pids, settings = service.config.read_text(), service.pids(), service.admin.configuration().settings
    (service.folder / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for broken, at, said in (
            ("fronts = 0", ":3: ", "fronts = 0 is not valid"),
            ("fronts = ", ":3: ", "the file is not valid TOML"),
            ('[models.x]\nfolder = "nothing"', ":4: ", "the folder does not exist"),
            ('[models.x]\nfolder = "empty"', ":4: ", "config.json: No such file or directory"),
            ("[queue]\nlimt = 3", ":4: ", "did you mean 'limit'?"),
            (
                '[models.x]\nfolder = "m"\nfallback = "y"',
                ":6: ",
                "models.x.fallback = 'y' does not name another model",
            ),
            (f'listen = "127.0.0.1:{taken.getsockname()[1]}"', "", "(Address already in use)"),
        ):
            service.config.write_text(good)
            with pytest.raises(AdminError) as refused:
                change(service, ("# here", broken), ('folder = "m"', 'folder = "m"\nmax_num_seqs = 3'))
            assert said in str(refused.value)
            assert at in str(refused.value)
            last = service.audit()[-1]
            assert last.action == "config.reload" and said in last.result
    assert service.pids() == pids
    assert service.admin.configuration().settings == settings
    assert read_answer(service.connect("m 1"))[-1] == "front-0 length"


def test_a_fallback_that_does_not_exist_is_shown_as_a_problem_at_the_start(make_service: Make) -> None:
    service = make_service()
    service.config.write_text(
        service.config.read_text().replace('folder = "m"', 'folder = "m"\nfallback = "y"')
    )
    service.start_and_wait()
    [problem] = [one for one in service.admin.status().problems if "fallback" in one.description]
    assert problem.where.startswith(f"{service.config}:")
    assert problem.description == "models.m.fallback = 'y' does not name another model or alias: remove it"


def test_a_change_that_fails_leaves_no_address_open() -> None:
    async def scenario() -> None:
        reloader = Reloader(
            loaded=Loaded(Settings(), {}, []),
            reread=reread,
            live=LiveSettings(Settings()),
            models=unused,
            check_models=lambda models: {},
            registry=Registry,
            drains=drains,
            publish=unused,
            listeners=[listener],
            hooks={"fronts": refuse},
        )
        with pytest.raises(OSError, match="too many"):
            await reloader.reload()
        assert listener.opened.fileno() == -1
        assert reloader.configuration().settings["fronts"] == Settings().fronts

    def reread() -> Loaded:
        return Loaded(Settings(fronts=Settings().fronts + 1), {}, [])

    def refuse(settings: Settings) -> None:
        raise OSError("too many open files")

    unused: Any = None
    drains: Any = SimpleNamespace(stopping=None)
    listener = OpeningListener()
    asyncio.run(scenario())


class OpeningListener:
    """A listener that opens a new socket at every reload."""

    def prepare(self, settings: Settings) -> socket.socket:
        self.opened = socket.socket()
        return self.opened

    def change(self, settings: Settings, opened: socket.socket | None) -> None:
        raise AssertionError("change() was called although the reload was refused")


def loaded(*files: str) -> Loaded:
    return Loaded(Settings(), {}, [Path(file) for file in files])


@pytest.mark.parametrize(
    ("former", "now", "refused"),
    [
        (loaded("/a.toml", "/conf.d/b.toml"), loaded("/a.toml"), False),
        (loaded("/a.toml", "/conf.d/b.toml"), loaded("/conf.d/b.toml"), True),
        (loaded("/a.toml"), loaded(), True),
        (loaded("/a.toml"), loaded("/home/a.toml"), True),
        (loaded("/conf.d/a.toml", "/conf.d/b.toml"), loaded("/conf.d/b.toml"), False),
        (loaded("/conf.d/a.toml"), loaded(), True),
        (loaded(), loaded("/a.toml"), False),
    ],
)
def test_a_missing_main_settings_file_is_refused(former: Loaded, now: Loaded, refused: bool) -> None:
    with pytest.raises(SettingsError, match="no longer exists") if refused else nullcontext():
        check_still_there(former, now)


def test_sighup_reloads_and_is_audited(make_service: Make) -> None:
    service = make_service().start_and_wait()
    assert service.process is not None
    service.config.write_text(f"drain_grace_s = 4\n{service.config.read_text()}")
    os.kill(service.process.pid, signal.SIGHUP)
    wait_until(lambda: service.admin.configuration().settings["drain_grace_s"] == 4)

    def audited() -> list[tuple[str, str]]:
        rows = service.audit()
        return [(row.actor, row.result) for row in rows if row.action == "config.reload"]

    wait_until(lambda: ("signal:SIGHUP", "ok") in audited())
    service.config.write_text("fronts = 0")
    os.kill(service.process.pid, signal.SIGHUP)
    wait_until(lambda: any("refused" in result for _, result in audited()))
    assert service.state() == "ready"


def test_a_reload_during_a_drain_does_not_change_the_drain(make_service: Make) -> None:
    service = make_service(models=("m", "n")).start_and_wait()
    service.admin.drain(DrainService(model="m"))
    service.admin.drain(DrainService(model="n"))
    wait_until(lambda: {drain.state for drain in service.admin.status().drains} == {"drained"})
    change(service, ('folder = "m"', 'folder = "m"\nmax_num_seqs = 4'))
    wait_until(lambda: names(service) == [("m-1", "ready")])
    assert "503 model 'm' is draining" in read_answer(service.connect("m 1"))[-1]
    service.admin.resume(ResumeService(model="m"))
    assert read_answer(service.connect("m 1"))[-1] == "front-0 length"
    # Removing a draining model ends its drain, so a model that is added later under the same name is not
    # draining.
    change(service, ('[models.n]\nfolder = "n"\n', ""))
    wait_until(lambda: len(service.pids()) == 2)
    assert service.admin.status().drains == []
    service.config.write_text(service.config.read_text() + '[models.n]\nfolder = "n"\n')
    reload(service)
    assert read_answer(service.connect("n 1"))[-1] == "front-0 length"


def test_unchanged_files_change_nothing_and_conf_d_files_can_be_added_and_removed(make_service: Make) -> None:
    service = make_service().start_and_wait()
    pids = service.pids()
    assert reload(service) == Reloaded(changed=[], models=[], at_restart=[])
    assert service.pids() == pids
    extra = Path(service.config.parent / "conf.d" / "20-more.toml")
    extra.parent.mkdir()
    extra.write_text("drain_grace_s = 4")
    assert reload(service).changed == ["drain_grace_s: 10.0 → 4.0"]
    assert service.admin.configuration().places["drain_grace_s"] == f"{extra}:1"
    extra.unlink()
    assert reload(service).changed == ["drain_grace_s: 4.0 → 10.0"]
