"""Every setting: its name, type, default and meaning. docs/configuration.md is generated from this file.

A struct is a table of the settings files; the docstring of a field is its documentation.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from appliance.messages import KeepRules, Limits, RetryRules
from appliance.protocol import LogLevel
from appliance.traffic.rules import QueueRules
from engine.messages import Device, DType, LoadFormat, Quantization, ReplicaSpec

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
    """A served model, by the name that clients use. Without any such table, the shipped model is served as
    "demo"."""

    folder: str
    """Folder of a Hugging Face checkpoint, relative to the settings file (as a flag: to the current
    directory)."""
    replicas: Processes = 1
    """Number of replicas."""
    pinned: bool = True
    """Whether the start of the service waits until this model is ready, and systemd's `start` with it."""
    device: Device = "auto"
    """"auto" is CUDA if a GPU is available, otherwise the CPU."""
    dtype: DType = "auto"
    """"auto" is the checkpoint's on CUDA, float32 on the CPU."""
    quantization: Quantization = "auto"
    """Quantization of the layers' weights: "auto" keeps the checkpoint's, "fp8" quantises them while they
    load."""
    kv_cache_dtype: Quantization = "auto"
    """Data type of the KV cache: "auto" is the model's; "fp8" halves the memory of the cache."""
    tensor_parallel_size: Processes = 1
    """Number of ranks (GPUs) of one replica."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt and output together. Default: the checkpoint's limit."""
    max_num_seqs: Positive = 64
    """Maximum number of sequences that run at once in one replica."""
    max_num_batched_tokens: Positive = 2048
    """Token budget of one step."""
    max_mixed_tokens: Positive | None = None
    """Token budget of a step that computes prompts while other sequences decode. A lower value shortens the
    time between tokens and makes prompts slower. Default: half of `max_num_batched_tokens`, at most 4096."""
    kv_blocks: Positive | None = None
    """Number of blocks of 64 tokens in the KV cache. Default: as many as fit into memory."""
    gpu_memory_utilization: Fraction = 0.95
    """Fraction of the device's memory that may be used."""
    load_format: LoadFormat = "safetensors"
    """"dummy" creates random weights, to measure the speed without the weights of a checkpoint."""
    prefix_cache: bool = True
    """Whether prompts with equal beginnings share cached KV blocks."""
    threads: Processes | None = None
    """CPU threads of each rank. Default: the number of cores divided by the ranks."""

    def spec(self, replica: str) -> ReplicaSpec:
        """Return the specification of a replica of this model."""
        shared = set(ReplicaSpec.__struct_fields__) & set(self.__struct_fields__)
        fields = {name: getattr(self, name) for name in shared}
        return ReplicaSpec(replica=replica, model_path=self.folder, **fields)


class UnixSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Access to the sockets in the run directory."""

    uids: Literal["owner", "any"] | list[UserId] = "owner"
    """Users who may use `api.sock`: "owner" (the service's user and root), "any" (all users that the file
    mode permits), or a list of numeric user ids (in addition to the owner and root)."""
    api_mode: SocketMode = "0660"
    """File mode of `api.sock`, octal. Sockets that systemd created have the mode of their unit."""
    admin_mode: SocketMode = "0660"
    """File mode of `admin.sock`, octal. In any mode, only the operators of `[admin]` and keys of scope
    `admin` or `read` are permitted."""


class AdminSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Operators, who may use everything on `admin.sock`, in addition to the service's user and root."""

    uids: list[UserId] = []
    """Numeric user ids."""
    groups: list[str | UserId] = msgspec.field(default_factory=lambda: ["appliance"])
    """Groups whose members are operators, by name or number. `admin.sock` belongs to the first group that
    exists."""


class QueueSettings(QueueRules, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The queue of waiting requests."""


class IdempotencySettings(RetryRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Requests with an `Idempotency-Key`: a retry waits for the running request, or gets its answer
    again. Answers are kept in memory only."""


class LogSettings(KeepRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request log. The log policy of each tenant decides what is kept of prompts and answers
    (`appliance tenants set --log-policy`)."""

    days: Days = 90.0
    """Number of days after which ended requests are removed; 0: never."""
    contents_days: Days = 30.0
    """Number of days after which prompts, answers and their hashes are removed, unless their tenant has its
    own `log_days`; 0: never."""


class MetricsSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Metrics for Prometheus. `GET /metrics` on admin.sock is always available."""

    listen: str | None = None
    """HOST:PORT on which metrics are served without a key, such as "127.0.0.1:9464"."""
    public: bool = False
    """Whether `listen` may be an address other than loopback. Metrics contain the names of tenants and
    models."""
    tenants: Positive = 200
    """Maximum number of tenants with metrics of their own: the first that send requests after a start. The
    other tenants are summed up."""

    def address(self) -> tuple[str, int] | None:
        """Return `listen` as host and port; None if it is not set."""
        return None if self.listen is None else parse_address(self.listen)


class LimitSettings(Limits, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Limits of what a front accepts from a client."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings outside of any table."""

    models: dict[str, ModelSettings] = {}
    """The served models by name."""
    listen: str | None = None
    """HOST:PORT (an IP address or localhost) for TCP, where clients need a bearer key. Default: only the Unix
    socket and the sockets that systemd passes to the service."""
    fronts: Processes = 1
    """Number of front processes. More fronts stream more tokens per second."""
    run_dir: str = ""
    """Directory of the sockets. Default: `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/appliance` or
    `/tmp/appliance-UID`."""
    state_dir: str = ""
    """Directory of the databases. Default: `$STATE_DIRECTORY` or `$XDG_STATE_HOME/appliance`
    (`~/.local/state`)."""
    drain_grace_s: Seconds = 10.0
    """How long running requests may continue after SIGTERM."""
    drain_notice_s: Seconds = 0.2
    """Time between "not ready" on `/health/ready` and the first request that a drain refuses. Set it above
    the interval at which a load balancer checks."""
    hang_timeout_s: PositiveSeconds = 20.0
    """A replica or front that was ready and does not report for this long is killed, and restarted unless it
    was stopping. For a step that a replica has announced, the limit is ten times the predicted time if that
    is longer."""
    load_timeout_s: PositiveSeconds = 600.0
    """A replica or front that is starting and reports no progress for this long is killed and restarted."""
    log_level: LogLevel = "info"
    """Lowest level that is logged."""
    unix: UnixSettings = UnixSettings()
    admin: AdminSettings = AdminSettings()
    queue: QueueSettings = QueueSettings()
    limits: LimitSettings = LimitSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    config_file: str = ""
    """The main settings file; not a setting."""

    @property
    def api_socket(self) -> Path:
        """The Unix socket of the API."""
        return Path(self.run_dir) / "api.sock"

    @property
    def admin_socket(self) -> Path:
        """The Unix socket of the operators."""
        return Path(self.run_dir) / "admin.sock"

    def address(self) -> tuple[str, int] | None:
        """Return `listen` as host and port; None if it is not set."""
        return None if self.listen is None else parse_address(self.listen)


class Flags(msgspec.Struct, kw_only=True):
    """The options of the command line; None or empty: not given."""

    config: str | None = None
    models: list[str] = []
    """Models in the form NAME=FOLDER. They replace the models of the settings files."""
    listen: str | None = None
    fronts: int | None = None
    run_dir: str | None = None
    state_dir: str | None = None
    log_level: LogLevel | None = None
    device: Device | None = None
    """This and the following options apply to every model."""
    dtype: DType | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: Quantization | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    load_format: LoadFormat | None = None


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with IPv6 addresses in brackets. Raises ValueError. Host names are refused, because a
    DNS lookup would block the service."""
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
