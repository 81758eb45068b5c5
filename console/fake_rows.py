"""The simulated service's lists: audit trail, log, settings and findings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from appliance.pages import ChainReport
from appliance.protocol import AuditHead, FindingLevel, Key, PeerMapping
from appliance.protocol.registry import RegisteredModel, RegisteredVersion
from console.fake_log import FakeLog
from console.fake_requests import finished_requests, usage_rows
from console.fake_tenants import tenant_record
from console.simulated import KEY_NAMES, key_id
from console.simulation import Simulation
from console.source import ListName, ListRow, Row

DEMO_OPERATOR = "uid:1000"
"""The operator who uses the demo's console."""
OTHER_OPERATOR = "uid:1001"
"""A second, simulated operator, who performs actions in the background."""
_SETTINGS = (
    ("run_dir", "/run/appliance", "/etc/appliance/appliance.toml:2"),
    ("state_dir", "/var/lib/appliance", "/etc/appliance/appliance.toml:3"),
    ("fronts", "2", "/etc/appliance/appliance.toml:4"),
    ("queue.limit", "2048", "/etc/appliance/conf.d/queue.toml:2"),
    ("queue.timeout_s", "600.0", "default"),
    ("models.llama-3.3-70b.tensor_parallel_size", "2", "/etc/appliance/appliance.toml:11"),
    ("models.llama-3.3-70b.quantization", "fp8", "/etc/appliance/appliance.toml:12"),
    ("metrics.listen", "127.0.0.1:9464", "/etc/appliance/appliance.toml:30"),
    ("log_level", "info", "default"),
)
_FINDINGS: tuple[tuple[FindingLevel, str, str, str], ...] = (
    ("ok", "gpus", "driver", "driver 580.65, CUDA 13.0, 4 GPUs"),
    ("ok", "models", "llama-3.3-70b", "71 GiB of weights fit on 2 GPUs"),
    ("warning", "machine", "swap", "2 GiB of swap in use: set vm.swappiness = 10"),
    ("ok", "databases", "control.db", "integrity check passed"),
)


class FakeRows:
    """The rows of all lists, including audit rows for actions performed in the demo."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.log = FakeLog(simulation)
        self.audit: list[ListRow] = []
        self.head = ""
        now = simulation.now
        for offset, action, target, actor in (
            (81_000, "config.reload", "", "uid:0"),
            (77_500, "tenants.set", "search", OTHER_OPERATOR),
            (52_200, "keys.create", "docs-rag", OTHER_OPERATOR),
            (30_400, "drain", "qwen3-8b", OTHER_OPERATOR),
            (30_100, "resume", "qwen3-8b", OTHER_OPERATOR),
            (9_700, "keys.rotate", "key_3f1a", f"{OTHER_OPERATOR} key:key_ad31"),
            (1_260, "requests.cancel", "req-41c08d22a7e5", OTHER_OPERATOR),
        ):
            self._add(now - offset, action, target, actor)

    def record(self, action: str, target: str, operator: str = DEMO_OPERATOR) -> None:
        """Add an audit row for an action."""
        self._add(self._simulation.now, action, target, operator)
        self.log.write(self._simulation.now, "core", "auditing", f"{action} by {operator}: ok")

    def verify(self) -> ChainReport:
        """Verify the audit rows' hashes."""
        before, broken = "", None
        for number, row in enumerate(self.audit, 1):
            before = _row_hash(before, number, row.subject, row.target)
            if row.detail["hash"] != before:
                broken = number
                break
        rows = len(self.audit) if broken is None else broken - 1
        newest = max(0, len(self.audit) - 2)
        return ChainReport(
            at=self._simulation.now,
            path="/var/lib/appliance/control.db",
            ok=broken is None,
            rows=rows,
            head=AuditHead(seq=rows, hash=self.audit[rows - 1].detail["hash"] if rows else ""),
            broken_seq=broken,
            problems=[] if broken is None else [f"row {broken}: rewritten: its hash does not match"],
            notes=[
                "the last 2 rows are newer than any recorded head, so their removal would not be detected"
            ],
            heads=1,
            journal_heads=0,
            journal_missing="the demo has no journal",
            confirmed_seq=min(newest, rows),
            spooled=0,
        )

    def of(self, name: ListName) -> Sequence[Row]:
        """Return the rows of the list with this name, newest first."""
        if name == "audit":
            return self.audit[::-1]
        if name == "finished":
            return finished_requests(self._simulation)
        if name == "usage":
            return usage_rows(self._simulation)
        if name == "models":
            return self._models()
        if name == "tenants":
            return [tenant_record(one, self._simulation.started) for one in self._simulation.tenants.values()]
        if name == "callers":
            return self._callers()
        if name == "settings":
            return [ListRow(id=key, actor=place, subject=key, text=value) for key, value, place in _SETTINGS]
        if name == "findings":
            return [
                ListRow(id=f"{area}/{subject}", level=level, actor=area, subject=subject, text=text)
                for level, area, subject, text in _FINDINGS
            ]
        return list(reversed(self.log.lines))

    def _models(self) -> list[RegisteredModel]:
        """Return two versions of each model: the serving version and its predecessor."""
        found: list[RegisteredModel] = []
        for name in dict.fromkeys(one.model for one in self._simulation.replicas):
            replicas = [one for one in self._simulation.replicas if one.model == name]
            versions = [
                RegisteredVersion(
                    version=number,
                    folder=f"/srv/models/{name}-v{number}",
                    state="ready" if number == 2 else "available",
                    added_at=self._simulation.started - (3 - number) * 600_000.0,
                    replicas=len(replicas) if number == 2 else 0,
                    memory_bytes=sum(one.weight_bytes + one.kv_bytes for one in replicas)
                    if number == 2
                    else 0,
                )
                for number in (1, 2)
            ]
            found.append(
                RegisteredModel(
                    name=name,
                    state="ready",
                    default=2,
                    previous=1,
                    source="registry",
                    aliases=["default"] if not found else [],
                    versions=versions,
                )
            )
        return found

    def _callers(self) -> list[Key | PeerMapping]:
        """Return three keys per tenant, and two local users."""
        tenants = list(self._simulation.tenants)
        peers = [
            PeerMapping(kind="uid", number=0, tenant=tenants[0], source="settings"),
            PeerMapping(
                kind="uid",
                number=1004,
                tenant=tenants[-1],
                source="mapped",
                created_at=self._simulation.started - 400_000.0,
            ),
        ]
        keys = [
            Key(
                id=key_id(f"{tenant}-{name}"),
                name=f"{tenant}-{name}",
                tenant=tenant,
                prefix="sk-app",
                created_at=self._simulation.started - 900_000.0,
                expires_at=self._simulation.started + 2_000_000.0 if name == "mobile" else None,
            )
            for tenant in self._simulation.tenants
            for name in KEY_NAMES
        ]
        return [*keys, *peers]

    def _add(self, at: float, action: str, target: str, actor: str) -> None:
        seq = len(self.audit) + 1
        self.head = _row_hash(self.head, seq, action, target)
        self.audit.append(
            ListRow(
                id=str(seq),
                at=at,
                actor=actor,
                subject=action,
                target=target,
                text="ok",
                detail={"hash": self.head},
            )
        )


def _row_hash(before: str, seq: int, action: str, target: str) -> str:
    return hashlib.sha256(f"{before}{seq}{action}{target}".encode()).hexdigest()
