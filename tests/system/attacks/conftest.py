"""Services shared by several attack tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from appliance.actions.parameters import ReloadConfig
from tests.ports import free_port
from tests.system.attacks.reading import findings
from tests.system.attacks.wire import Address, tcp_address, wait_for
from tests.system.service import Service, service


class Target(NamedTuple):
    """A service under attack, and the key of a separate tenant."""

    running: Service
    tcp: Address
    metrics: Address
    key: str

    @property
    def unix(self) -> Address:
        return str(self.running.api_socket)

    @property
    def admin(self) -> Address:
        return str(self.running.run_dir / "admin.sock")

    @property
    def authorization(self) -> str:
        return f"Authorization: Bearer {self.key}"

    def doctor(self) -> list[str]:
        """Return the texts of all of the doctor's findings."""
        return [finding.text for finding in findings(self.running)]

    def wait_for_problem(self, text: str) -> None:
        """Wait until `status` and `doctor` report a problem with this text."""

        def is_shown() -> bool:
            return any(text in one["description"] for one in self.running.status()["problems"])

        wait_for(is_shown, f"the problem in the status: {text}")
        wait_for(lambda: any(text in one for one in self.doctor()), f"the finding of the doctor: {text}")

    def answers_local_users(self) -> bool:
        """Return whether the service answers a request on the Unix socket."""
        with self.running.http() as client:
            return client.get("/v1/models").status_code == 200


@contextmanager
def target(folder: Path, limits: str = "", fronts: int = 1, flags: Sequence[str] = ()) -> Iterator[Target]:
    """Start a service with TCP and metrics. `limits` are lines for the [limits] table of its settings, and
    `flags` are options of `appliance serve`."""
    settings = folder / "appliance.toml"
    settings.write_text(
        f'listen = "127.0.0.1:{free_port()}"\nfronts = {fronts}\n[metrics]\n'
        f'listen = "127.0.0.1:{free_port()}"\n[limits]\n{limits}\n'
    )
    with service("--config", str(settings), *flags, kind=Service) as running:
        running.tenant("acme")
        yield Target(running, tcp_address(running), tcp_address(running, "metrics"), running.key("k", "acme"))


@contextmanager
def limited(attacked: Target, limits: str) -> Iterator[Target]:
    """Replace the service's limits for the duration of the block."""
    path = Path(attacked.running.flags[1])
    before = path.read_text()

    def use(text: str) -> None:
        path.write_text(text)
        attacked.running.act(ReloadConfig())

    use(before.partition("[limits]")[0] + f"[limits]\n{limits}\n")
    try:
        yield attacked
    finally:
        use(before)


@pytest.fixture(scope="session")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Start a service with one front and the default limits, shared by the tests of all files. A file may
    replace the limits for its tests."""
    with target(tmp_path_factory.mktemp("attacked")) as made:
        yield made
