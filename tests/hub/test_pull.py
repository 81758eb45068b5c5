"""Tests of downloads from a hub on loopback."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import scan_cache_dir, snapshot_download

from appliance.hub.cache import RESERVE_BYTES, RepositoryCache
from appliance.hub.repository import Hub, HubError, list_files, parse_reference
from tests.hub.conftest import Pull
from tests.hub.server import COMMIT, HubServer

SHARD_BYTES = 3 << 20
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NOISE = random.Random(7).randbytes(2 * SHARD_BYTES)


def checkpoint() -> dict[str, bytes]:
    """Return files that are named like those of a checkpoint. The weights are random bytes, because nothing
    loads them."""
    return {
        "config.json": b'{"model_type": "llama"}',
        "tokenizer.json": NOISE[-100_000:],
        "tokenizer_config.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
        SHARDS[0]: NOISE[:SHARD_BYTES],
        SHARDS[1]: NOISE[SHARD_BYTES:],
    }


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.hub.download._MAX_WAIT_S", 0.05)


def contents(folder: str) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file()
    }


def test_a_pull_downloads_the_files_that_the_product_reads_and_no_others(hub: HubServer, pull: Pull) -> None:
    wanted = checkpoint() | {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}
    others = dict.fromkeys(
        (
            "README.md",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "pytorch_model.bin.index.json",
            "onnx/model.onnx",
            "original/params.json",
            "../outside.json",
            ".hidden.json",
        ),
        b"unwanted",
    )
    hub.add("org/demo", wanted | others)
    pulled = pull()
    assert contents(pulled.folder) == wanted
    assert (pulled.commit, pulled.files, pulled.received_bytes) == (COMMIT, 8, pulled.bytes)


def test_a_single_weights_file_needs_no_index(hub: HubServer, pull: Pull) -> None:
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"weights"}
    hub.add("org/demo", files)
    assert contents(pull().folder) == files


def test_tools_that_use_huggingface_hub_find_the_model_in_the_cache(
    hub: HubServer, pull: Pull, root: Path
) -> None:
    hub.add("org/demo", checkpoint())
    folder = pull().folder
    assert snapshot_download("org/demo", cache_dir=root, local_files_only=True) == folder
    scanned = scan_cache_dir(root)
    assert not scanned.warnings
    assert [(repo.repo_id, repo.nb_files) for repo in scanned.repos] == [("org/demo", 7)]


def test_a_second_pull_receives_nothing(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    first = pull()
    hub.requests.clear()
    second = pull()
    assert (second.folder, second.received_bytes) == (first.folder, 0)
    assert not [request for request in hub.requests if "resolve" in request.path]


def test_a_new_commit_gets_its_own_folder_and_receives_only_changed_files(hub: HubServer, pull: Pull) -> None:
    repository = hub.add("org/demo", checkpoint())
    first = pull()
    changed = b'{"model_type": "llama", "changed": true}'
    repository.files["config.json"] = changed
    repository.revisions["main"] = "f" * 40
    second = pull()
    assert second.received_bytes == len(changed)
    assert (Path(first.folder) / "config.json").read_bytes() == checkpoint()["config.json"]
    assert (Path(second.folder) / "config.json").read_bytes() == changed


def test_a_revision_is_recorded_under_its_name(hub: HubServer, pull: Pull, root: Path) -> None:
    hub.add("org/demo", checkpoint(), revisions={"main": COMMIT, "refs/pr/1": "a" * 40})
    assert Path(pull("org/demo@refs/pr/1").folder).name == "a" * 40
    assert (root / "models--org--demo/refs/refs/pr/1").read_text() == "a" * 40


def test_an_interrupted_pull_continues_in_the_middle_of_a_file(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    released = threading.Event()

    def interrupt(done: int) -> None:
        if done > 2 << 20:
            raise KeyboardInterrupt

    # Prevent the server from sending everything before the interruption.
    hub.faults.before_piece = lambda path, offset: (
        (released.wait(60) if path in SHARDS and offset >= 2 << 20 else None) and None
    )
    with pytest.raises(KeyboardInterrupt):
        pull(shown=interrupt)
    released.set()
    hub.requests.clear()
    hub.storage_requests.clear()
    pulled = pull()
    assert contents(pulled.folder) == checkpoint()
    assert pulled.received_bytes <= 2 * SHARD_BYTES - (2 << 20)
    assert any(request.range for shard in SHARDS for request in hub.sent(shard))


def test_a_dropped_connection_is_continued_without_an_error(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.close_after_bytes = 1 << 20
    hub.faults.times = 3
    pulled = pull()
    assert contents(pulled.folder) == checkpoint()
    assert sum(request.range is not None for request in hub.storage_requests) == 3


def test_a_server_that_ignores_ranges_sends_the_file_again(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.close_after_bytes = 1 << 20
    hub.faults.ignore_ranges = True
    assert contents(pull().folder) == checkpoint()


def test_an_overloaded_hub_is_asked_again(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.status, hub.faults.times = 503, 4
    assert contents(pull().folder) == checkpoint()


def test_a_hub_that_stays_overloaded_is_reported_with_its_status(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.status, hub.faults.times = 503, 10_000
    with pytest.raises(HubError, match="HTTP status 503"):
        pull()


def test_a_file_with_a_wrong_checksum_is_deleted_and_the_others_are_kept(
    hub: HubServer, pull: Pull, root: Path
) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.wrong_bytes_of = SHARDS[1]
    with pytest.raises(HubError, match=f"{SHARDS[1]} of org/demo has the checksum .* the file was deleted"):
        pull()
    assert not (root / "models--org--demo/snapshots" / COMMIT / SHARDS[1]).exists()
    hub.faults.wrong_bytes_of = ""
    pulled = pull()
    assert contents(pulled.folder) == checkpoint()
    assert pulled.received_bytes <= 2 * SHARD_BYTES


def test_a_received_part_that_was_changed_is_detected(hub: HubServer, pull: Pull, root: Path) -> None:
    hub.add("org/demo", checkpoint())
    listing = list_files(Hub(hub.url, None), parse_reference("org/demo"))
    cache = RepositoryCache(root, "org/demo")
    cache.prepare()
    cache.partial(listing.files[SHARDS[0]]).write_bytes(bytes(1000))
    with pytest.raises(HubError, match="checksum"):
        pull()
    assert contents(pull().folder) == checkpoint()


def test_the_token_is_sent_to_the_hub_but_not_to_its_storage(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint(), gated=True, token="hf_secret")
    pull(token="hf_secret")
    assert {request.authorization for request in hub.requests if "org/demo" in request.path} == {
        "Bearer hf_secret"
    }
    assert {request.authorization for request in hub.storage_requests} == {None}


def test_a_gated_repository_without_a_token_names_the_page_and_the_login(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint(), gated=True, token="hf_secret")
    with pytest.raises(
        HubError, match=r"restricted: accept its terms on http.*/org/demo, then set \$HF_TOKEN"
    ):
        pull()
    with pytest.raises(HubError, match="the token has no access to org/demo"):
        pull(token="hf_other")


def test_an_unknown_repository_and_an_unknown_revision_are_named(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    with pytest.raises(HubError, match="has no repository org/other, or it is private"):
        pull("org/other")
    with pytest.raises(HubError, match="org/demo has no revision 'v9'"):
        pull("org/demo@v9")


@pytest.mark.parametrize(
    "text", ("demo", "org/demo/x", "org/../x", "org/demo@", "org/demo@../x", "a--b/c", "")
)
def test_an_invalid_reference_is_refused_without_a_request(hub: HubServer, pull: Pull, text: str) -> None:
    with pytest.raises(HubError, match="write"):
        pull(text)
    assert not hub.requests


@pytest.mark.parametrize(
    ("files", "reason"),
    (
        (("config.json", "model-Q4_K_M.gguf"), "only in GGUF, the format of llama.cpp"),
        (("config.json", "pytorch_model.bin"), "no safetensors files; it has .bin files"),
        (("config.json", "consolidated.safetensors"), "neither model.safetensors nor"),
        (("config.json", "model.safetensors"), "no tokenizer.json"),
        (("tokenizer.json", "model.safetensors"), "no config.json"),
    ),
)
def test_a_repository_that_the_product_cannot_read_is_refused_before_the_download(
    hub: HubServer, pull: Pull, files: tuple[str, ...], reason: str
) -> None:
    hub.add("org/demo", dict.fromkeys(files, b"{}"))
    with pytest.raises(HubError, match=reason):
        pull()
    assert not [request for request in hub.requests if "resolve" in request.path]


def test_an_index_that_lists_a_missing_shard_is_refused(hub: HubServer, pull: Pull) -> None:
    files = checkpoint()
    del files[SHARDS[1]]
    hub.add("org/demo", files)
    with pytest.raises(HubError, match=f"lists '{SHARDS[1]}', but the repository has no such file"):
        pull()


def test_a_hub_that_cannot_be_reached_is_named_with_the_remedy(hub: HubServer, pull: Pull) -> None:
    hub.close()
    with pytest.raises(HubError, match=r"http://127.*cannot be reached .* \$HF_ENDPOINT to a mirror"):
        pull()


def test_too_little_disk_space_is_refused_with_both_numbers_and_the_folder(
    hub: HubServer, pull: Pull, root: Path
) -> None:
    hub.add("org/demo", checkpoint(), sizes={SHARDS[0]: 10**15})
    with pytest.raises(HubError) as refused:
        pull()
    text = str(refused.value)
    assert f"needs 909.5 TiB (1,000,000,003,145,728 bytes) on the disk that holds {root}" in text
    assert "bytes) are free" in text
    assert not hub.sent(SHARDS[0])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return the root of a file system of 80 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=80m", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_during_a_pull_keeps_the_received_part(
    hub: HubServer, pull: Pull, small_disk: Path
) -> None:
    hub.add("org/demo", checkpoint())
    ballast = small_disk / "ballast"

    def fill(path: str, offset: int) -> None:
        if path in SHARDS and offset >= 2 << 20 and not ballast.exists():
            ballast.write_bytes(bytes((80 << 20) - RESERVE_BYTES - (3 << 20)))

    hub.faults.before_piece = fill
    message = f"the disk that holds {small_disk} has only .* the received part is kept"
    with pytest.raises(HubError, match=message):
        pull(into=small_disk)
    free = os.statvfs(small_disk)
    assert free.f_bavail * free.f_frsize > RESERVE_BYTES // 2
    hub.faults.before_piece = lambda path, offset: None
    ballast.unlink()
    pulled = pull(into=small_disk)
    assert contents(pulled.folder) == checkpoint()
    assert pulled.received_bytes < 2 * SHARD_BYTES


def test_a_refused_write_is_reported_and_continued_later(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))
    try:
        with pytest.raises(
            HubError, match=r"cannot be written \(File too large\): the received part is kept"
        ):
            pull()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    pulled = pull()
    assert contents(pulled.folder) == checkpoint()
    assert pulled.received_bytes < 2 * SHARD_BYTES


def test_two_pulls_of_a_repository_do_not_run_at_the_same_time(
    hub: HubServer, pull: Pull, root: Path
) -> None:
    hub.add("org/demo", checkpoint())
    with (
        RepositoryCache(root, "org/demo").lock(),
        pytest.raises(HubError, match="another process is pulling org/demo"),
    ):
        pull()


def test_a_pull_leaves_no_threads_and_no_descriptors(hub: HubServer, pull: Pull) -> None:
    hub.add("org/demo", checkpoint())
    hub.faults.wrong_bytes_of = SHARDS[0]
    for _ in range(3):
        with pytest.raises(HubError):
            pull()
    opened = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_open(name)]
    assert not [path for path in opened if "models--org--demo" in path]


def _is_open(name: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{name}")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_pulls_as_the_owner_of_the_cache(hub: HubServer, pull: Pull, open_folder: Path) -> None:
    hub.add("org/demo", checkpoint())
    root = open_folder / "hub"
    root.mkdir()
    os.chown(root, 65534, 65534)
    root.chmod(0o2775)
    pulled = pull(into=root)
    for path in (*Path(pulled.folder).iterdir(), *(root / "models--org--demo").rglob("*")):
        assert (path.stat().st_uid, path.stat().st_gid) == (65534, 65534), path
        assert path.stat().st_mode & 0o064 == 0o064, path
    assert os.geteuid() == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_link_in_the_cache_does_not_direct_roots_writes_elsewhere(
    hub: HubServer, pull: Pull, open_folder: Path, tmp_path: Path
) -> None:
    hub.add("org/demo", checkpoint())
    root = open_folder / "hub"
    (root / "models--org--demo").mkdir(parents=True)
    tmp_path.chmod(0o755)
    (tmp_path / "roots").mkdir()
    (root / "models--org--demo" / "blobs").symlink_to(tmp_path / "roots")
    for path in (root, root / "models--org--demo"):
        os.chown(path, 65534, 65534)
    with pytest.raises((HubError, OSError), match=r"[Pp]ermission denied"):
        pull(into=root)
    assert not list((tmp_path / "roots").iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_the_services_group_can_read_and_continue_an_operators_pull(
    hub: HubServer, pull: Pull, open_folder: Path
) -> None:
    operator, service = 1001, 65534
    hub.add("org/demo", checkpoint())
    root = open_folder / "hub"
    root.mkdir()
    os.chown(root, service, service)
    root.chmod(0o2775)
    former, umask = os.getgroups(), os.umask(0o077)
    os.setgroups([service])
    os.setegid(operator)
    os.seteuid(operator)
    try:
        pull(into=root)
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(former)
        os.umask(umask)
    for path in (root / "models--org--demo").rglob("*"):
        found = path.stat()
        assert (found.st_uid, found.st_gid) == (operator, service), path
        assert found.st_mode & 0o660 == 0o660, path
