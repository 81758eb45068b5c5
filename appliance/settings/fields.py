"""Every setting: its name, type, default and meaning. docs/configuration.md is made of this file.

A struct is a table of the settings files; the words under a field are its documentation.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from appliance.messages import KeepRules, Limits, RetryRules
from appliance.traffic.rules import QueueRules
from engine.messages import ReplicaSpec

# Every number has an upper bound, so that a mistyped one is refused when the file is read.
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Days = Annotated[float, msgspec.Meta(ge=0, le=36_525)]
UserId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 2)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
SocketMode = Annotated[
    str, msgspec.Meta(pattern="^0?[0-7]{3}$", description='a file mode in octal, such as "0660"')
]

DEMO_MODEL = "demo"


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A model that apps name, and how its replicas run. Without any such table the shipped model is served,
    named "demo"."""

    folder: str
    """Folder of a Hugging Face checkpoint; relative to the settings file (or, by flag, to where you are)."""
    replicas: Processes = 1
    """Running copies."""
    pinned: bool = True
    """Whether the service counts as started only when this model answers: systemd's `start` waits for it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto" is CUDA where there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """"auto" is the checkpoint's on CUDA, float32 on the CPU."""
    quantization: Literal["auto", "fp8"] = "auto"
    """Of the layers' matrices: "auto" is as the checkpoint has them, "fp8" quantises them while they load."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Of the KV cache: "auto" is the model's, "fp8" halves it."""
    tensor_parallel_size: Processes = 1
    """Ranks (GPUs) that hold one replica together."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt and output together; without it, the checkpoint's."""
    max_num_seqs: Positive = 64
    """Sequences that run at once in one replica."""
    max_num_batched_tokens: Positive = 2048
    """Token budget of one step."""
    max_mixed_tokens: Positive | None = None
    """Token budget of a step in which sequences decode: less makes the time between tokens shorter while
    prompts are computed, and these slower; without it half of `max_num_batched_tokens`, at most 4096."""
    kv_blocks: Positive | None = None
    """Blocks of 64 tokens in the KV cache; without it, sized from memory."""
    gpu_memory_utilization: Fraction = 0.95
    """Part of the device's memory that may be used."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """"dummy" makes random weights: for measuring speed without a checkpoint's files."""
    prefix_cache: bool = True
    """Whether equal beginnings of prompts are computed once."""
    threads: Processes | None = None
    """CPU threads per rank; without it, the cores divided by the ranks."""

    def spec(self, replica: str) -> ReplicaSpec:
        """What a replica of this model is told."""
        return ReplicaSpec(
            replica=replica,
            model_path=self.folder,
            load_format=self.load_format,
            device=self.device,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_mixed_tokens=self.max_mixed_tokens,
            kv_blocks=self.kv_blocks,
            gpu_memory_utilization=self.gpu_memory_utilization,
            prefix_cache=self.prefix_cache,
            threads=self.threads,
        )


class UnixSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Who may use the sockets in the run directory."""

    uids: Literal["owner", "any"] | list[UserId] = "owner"
    """Who may ask on `api.sock`: "owner" (the service's own user, and root), "any" (whoever the file mode
    lets in), or a list of numeric user ids (besides the owner and root)."""
    api_mode: SocketMode = "0660"
    """File mode of `api.sock`, octal. Sockets that systemd made have the mode that their unit says."""
    admin_mode: SocketMode = "0660"
    """File mode of `admin.sock`, octal. Whatever it is, only those are answered whom `[admin]` names, and
    keys of scope `admin` or `read`."""


class AdminSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Operators, who may see and do everything on `admin.sock`, besides the service's own user and root."""

    uids: list[UserId] = []
    """Users, by number."""
    groups: list[str | UserId] = msgspec.field(default_factory=lambda: ["appliance"])
    """Groups whose members are operators, by name or number; `admin.sock` belongs to the first that there
    is."""


class QueueSettings(QueueRules, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Requests that wait for their turn."""


class IdempotencySettings(RetryRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Requests with an `Idempotency-Key`, whose retries join the run under way or get its answer again.
    Answers are kept in memory only."""


class LogSettings(KeepRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request log. What is kept of prompts and answers, if anything, is each tenant's log policy
    (`appliance tenants set --log-policy`)."""

    days: Days = 90.0
    """Requests that ended are removed after so many days; 0: never."""
    contents_days: Days = 30.0
    """Prompts, answers and their hashes are removed after so many days, unless their tenant has its own
    `log_days`; 0: never."""


class MetricsSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Metrics for Prometheus. `GET /metrics` on admin.sock is always there."""

    listen: str | None = None
    """HOST:PORT on which everybody who can connect gets them, e.g. "127.0.0.1:9464"."""
    public: bool = False
    """Whether `listen` may be another address than the loopback interface's: the metrics name tenants and
    models."""
    tenants: Positive = 200
    """The most tenants with metrics of their own: the first that ask after a start. The others are summed
    up."""

    def address(self) -> tuple[str, int] | None:
        """`listen` as host and port."""
        return None if self.listen is None else parse_address(self.listen)


class LimitSettings(Limits, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What a front takes from a client."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings that stand in no table."""

    models: dict[str, ModelSettings] = {}
    """By the name that apps use."""
    listen: str | None = None
    """HOST:PORT (an IP address or localhost) for TCP, where a bearer key is needed; without it there are only
    the Unix socket and what systemd listens on for the service."""
    fronts: Processes = 1
    """Front processes: more for more streamed tokens per second."""
    run_dir: str = ""
    """Where the sockets are; `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/appliance` or `/tmp/appliance-UID`."""
    state_dir: str = ""
    """Where the databases are; `$STATE_DIRECTORY` or `$XDG_STATE_HOME/appliance` (`~/.local/state`)."""
    drain_grace_s: Seconds = 10.0
    """On SIGTERM, running requests get this long to finish."""
    drain_notice_s: Seconds = 0.2
    """Between "not ready" on `/health/ready` and the first request that a drain refuses: raise it above the
    interval in which a load balancer looks."""
    hang_timeout_s: PositiveSeconds = 20.0
    """A replica or front that was ready and does not report for this long is killed, and started again unless
    it was to end. A replica gets longer for a step that it has announced: ten times the predicted time."""
    load_timeout_s: PositiveSeconds = 600.0
    """A replica that starts or loads and reports no progress for this long is killed and started anew; so is
    a front that starts and says nothing."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    unix: UnixSettings = UnixSettings()
    admin: AdminSettings = AdminSettings()
    queue: QueueSettings = QueueSettings()
    limits: LimitSettings = LimitSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    config_file: str = ""
    """The file that was read; not a setting."""

    @property
    def api_socket(self) -> Path:
        """The Unix socket of the API."""
        return Path(self.run_dir) / "api.sock"

    @property
    def admin_socket(self) -> Path:
        """The Unix socket of the operators."""
        return Path(self.run_dir) / "admin.sock"

    def address(self) -> tuple[str, int] | None:
        """`listen` as host and port."""
        return None if self.listen is None else parse_address(self.listen)


class Flags(msgspec.Struct, kw_only=True):
    """What the command line says; None and empty say nothing."""

    config: str | None = None
    models: list[str] = []
    """NAME=FOLDER each; they replace the files' models."""
    listen: str | None = None
    fronts: int | None = None
    run_dir: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    device: str | None = None
    """These change every model."""
    dtype: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    load_format: str | None = None


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, IPv6 hosts in brackets. Raises ValueError, also for names: to look one up may take
    longer than the service may stand still."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"{text!r} is not HOST:PORT with an IP address (or localhost)") from None
    return host, int(port)
