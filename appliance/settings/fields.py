"""Defines every setting: its name, type, default and meaning. docs/configuration.md is generated from this
file. Each struct corresponds to a table in the settings files, and each field's docstring becomes that
setting's documentation.
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from appliance.alert_rules import AlertRule, AlertSink
from appliance.channel.front_settings import KeepRules, Limits, RetryRules
from appliance.channel.sampling import SamplingDefaults
from appliance.protocol import LogLevel
from appliance.traffic.rules import QueueRules
from engine.messages import Device, DType, LoadFormat, Quantization, ReplicaSpec

# Every number has an upper bound, so that most typos are caught when the file is read.
Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
Processes = Annotated[int, msgspec.Meta(ge=1, le=1024)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Days = Annotated[float, msgspec.Meta(ge=0, le=36_525)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
TelemetryDays = Annotated[float, msgspec.Meta(gt=0, le=3650)]
UserId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 2)]
Cpus = Annotated[float, msgspec.Meta(ge=0.1, le=4096)]
Gigabytes = Annotated[float, msgspec.Meta(ge=0.1, le=1e6)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
PositiveGigabytes = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
NonNegativeGigabytes = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
SocketMode = Annotated[
    str, msgspec.Meta(pattern="^0?[0-7]{3}$", description='an octal file mode such as "0660"')
]

DEMO_MODEL = "demo"


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A served model. NAME is the name that clients use. If there is no `[models.NAME]` table, the bundled
    model is served as "demo"."""

    folder: str
    """Folder of a Hugging Face checkpoint. A relative path is relative to the settings file that contains it
    or, on the command line, to the current directory."""
    replicas: Processes = 1
    """Number of replicas. If `max_replicas` is set, this is only the initial number."""
    max_replicas: Processes | None = None
    """Maximum number of replicas. If set, replicas are added and removed according to the load
    ([models.md](models.md#replicas-by-load)). Default: the number of replicas is fixed."""
    min_replicas: Processes | None = None
    """Minimum number of replicas if `max_replicas` is set. Default: `replicas`."""
    ttft_target_s: PositiveSeconds = 2.0
    """Target time to first token, in seconds. If `max_replicas` is set, a replica is added when requests come
    close to this target."""
    required: bool = True
    """Whether the service reports ready only while this model is ready. Startup, including `systemctl start`,
    waits for required models, which then stay loaded. A model that is not required is loaded at startup if it
    fits into memory, otherwise on its first request ([models.md](models.md))."""
    pinned: bool = False
    """Whether the model stays loaded once it has been loaded."""
    idle_unload_s: Seconds = 0.0
    """Time to live in seconds: a model without requests for this long is unloaded until its next request. 0
    disables unloading. A request's `keep_alive` takes precedence for the tenant that sent it."""
    device: Device = "auto"
    """Device that runs the model. "auto" selects CUDA if a GPU is available, otherwise the CPU."""
    dtype: DType = "auto"
    """Data type of weights and activations. "auto" selects the checkpoint's data type on CUDA, and float32 on
    the CPU."""
    quantization: Quantization = "auto"
    """Quantization of the layers' weights. "auto" keeps the checkpoint's format; "fp8" converts the weights
    to FP8 during loading."""
    kv_cache_dtype: Quantization = "auto"
    """Data type of the KV cache. "auto" selects the model's data type; "fp8" needs half the memory of a
    16-bit type."""
    tensor_parallel_size: Processes = 1
    """Number of ranks per replica. Each rank uses one GPU."""
    expert_parallel: bool = False
    """Whether each rank of a mixture-of-experts model holds some of the experts in full. If not, each rank
    holds a slice of every expert."""
    max_model_len: Positive | None = None
    """Maximum sequence length in tokens, including prompt and output. Default: the checkpoint's limit."""
    max_num_seqs: Positive = 64
    """Maximum number of sequences that a replica runs concurrently."""
    max_num_batched_tokens: Positive = 2048
    """Maximum number of tokens computed per step."""
    max_mixed_tokens: Positive | None = None
    """Maximum number of tokens in a step that computes prompts while other sequences decode. A lower value
    shortens the time between tokens but slows down prompt processing. Default: half of
    `max_num_batched_tokens`, at most 4096."""
    kv_blocks: Positive | None = None
    """Number of KV cache blocks of 64 tokens each. Default: as many as fit into memory."""
    gpu_memory_utilization: Fraction = 0.95
    """Fraction of device memory that a rank may use."""
    load_format: LoadFormat = "safetensors"
    """"safetensors" loads the checkpoint's weights. "dummy" creates random weights, which allows speed
    measurements without a complete checkpoint."""
    prefix_cache: bool = True
    """Whether prompts with a common prefix share cached KV blocks."""
    threads: Processes | None = None
    """Number of CPU threads per rank. Default: the number of usable cores, or `cpu_limit`, divided by the
    number of ranks."""
    cpu_limit: Cpus | None = None
    """Maximum CPU usage of a replica, in CPUs. This limit requires a cgroup that systemd delegates to the
    service ([models.md](models.md#limits-of-replicas)). Default: no limit."""
    memory_limit_gb: Gigabytes | None = None
    """Maximum host memory of a replica in GB (1,000,000,000 bytes). Like `cpu_limit`, this requires a
    delegated cgroup. Default: no limit."""
    cpu_fallback: bool = False
    """Whether to run on the CPU if there is no GPU or not enough GPU memory. The model is then slower, and
    `appliance status` shows why."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the templates in the folder. Relative paths are resolved
    as for `folder`. The file is read when the model is loaded or its settings change."""
    fallback: str | None = None
    """Name of the model that answers requests while this one is overloaded or has failed, for keys with
    `--fallback allowed`. The answer's `model` field then names the fallback model. Default: none."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Default sampling parameters, in a separate table."""

    def replica_range(self) -> tuple[int, int]:
        """Return the minimum and maximum number of replicas."""
        if self.max_replicas is None:
            return self.replicas, self.replicas
        least = self.replicas if self.min_replicas is None else self.min_replicas
        return min(least, self.max_replicas), self.max_replicas

    def within_range(self, replicas: int) -> int:
        """Return `replicas`, limited to the minimum and maximum number of replicas."""
        least, most = self.replica_range()
        return min(max(replicas, least), most)

    @property
    def text(self) -> tuple[str, str | None, SamplingDefaults]:
        """The settings that front processes use. When one of them changes, the front processes receive the
        new values. Replicas are replaced only if the folder has changed."""
        return self.folder, self.chat_template, self.sampling

    def spec(self, replica: str) -> ReplicaSpec:
        """Return the specification of this model's replicas."""
        shared = set(ReplicaSpec.__struct_fields__) & set(self.__struct_fields__)
        fields = {name: getattr(self, name) for name in shared}
        if self.threads is None and self.cpu_limit is not None:
            fields["threads"] = max(1, int(self.cpu_limit / self.tensor_parallel_size))
        return ReplicaSpec(replica=replica, model_path=self.folder, **fields)


class GroupSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """A group of models that must never be loaded at the same time, or must always be loaded together. NAME
    can be chosen freely. See [models.md](models.md)."""

    models: list[str]
    """Model names, as used by applications. A name covers all versions of the model."""
    load: Literal["one", "all"]
    """"one": at most one model of the group is loaded at a time. "all": the models are loaded and unloaded
    together."""


class OnDemandSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Loads models on their first request and unloads other models to make room for them."""

    memory_gb: PositiveGigabytes | None = None
    """Total host memory in GB (10^9 bytes) that models on the CPU may use, as predicted by `appliance models
    fit`. Default: the available memory. On GPUs, `gpu_memory_utilization` is the limit."""
    sleeping_memory_gb: NonNegativeGigabytes = 0.0
    """Host memory in GB (10^9 bytes) for the weights of sleeping models. Instead of being unloaded
    automatically, a GPU model whose weights fit within this limit is put to sleep, and its next request wakes
    it. When the limit is reached, the least recently used sleeping models are unloaded. The memory is
    page-locked. 0 disables sleeping: models are always unloaded."""
    min_residence_s: Seconds = 10.0
    """A model is normally not evicted within this many seconds of the start of loading. A busy model may be
    evicted only after requests for another model have waited this long. Once those requests have waited 5 s
    longer, even recently loaded models may be evicted."""


class UnixSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Access to the sockets in the run directory."""

    uids: Literal["owner", "any"] | list[UserId] = "owner"
    """Users who may use `api.sock` without a key, in addition to the service's user and root: "owner" (no
    other users), "any" (all users that the file mode permits), or a list of numeric user ids."""
    api_mode: SocketMode = "0660"
    """Octal file mode of `api.sock`. If systemd creates the socket, its mode comes from `SocketMode=` in the
    unit instead."""
    admin_mode: SocketMode = "0660"
    """Octal file mode of `admin.sock`. Even if the mode lets other users connect, only operators and clients
    with an `admin` or `read` key can use `admin.sock`."""


class AdminSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Additional operators, besides the service's user and root. Operators have full access to
    `admin.sock`."""

    uids: list[UserId] = []
    """Numeric user ids of operators."""
    groups: list[str | UserId] = msgspec.field(default_factory=lambda: ["appliance"])
    """Names or numbers of groups whose members are operators. `admin.sock` is owned by the first of these
    groups that exists."""


class QueueSettings(QueueRules, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """The queue of waiting requests."""


class IdempotencySettings(RetryRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Requests with an `Idempotency-Key`. A retry joins the original request if it is still running, and
    otherwise receives the same answer. Answers are kept only in memory."""


class LogSettings(KeepRules, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The request log. Each tenant's log policy controls whether prompts and answers are stored (`appliance
    tenants set --log-policy`)."""

    days: Days = 90.0
    """Number of days after which finished requests are removed from the log; 0 means never."""
    usage_days: Days = 800.0
    """Number of days for which daily usage per tenant, key and model is kept (`appliance usage`); 0 means
    forever."""
    contents_days: Days = 30.0
    """Number of days after which prompts, answers and their hashes are removed. A tenant's `log_days` takes
    precedence. 0 means never."""


class ModelPrices(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Prices for model NAME, from which `appliance usage` computes costs. All prices are per million tokens,
    in any currency. A price change applies to all days, including past ones. Models that are no longer served
    can still have prices."""

    prompt: Price = 0.0
    """Price per million prompt tokens not found in the prefix cache."""
    cached: Price | None = None
    """Price per million prompt tokens found in the prefix cache. Default: `prompt`."""
    output: Price = 0.0
    """Price per million output tokens delivered."""


class MetricsSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Metrics for Prometheus. `GET /metrics` on admin.sock is always available."""

    listen: str | None = None
    """Address (HOST:PORT) on which metrics are served without a key, such as "127.0.0.1:9464". Default:
    none."""
    public: bool = False
    """Whether `listen` may be a non-loopback address. Metrics contain tenant and model names."""
    tenants: Positive = 200
    """Maximum number of tenants with their own metrics: the first ones to send requests after startup. The
    metrics of all other tenants are summed."""

    def address(self) -> tuple[str, int] | None:
        """Return `listen` as host and port, or None if it is not set."""
        return None if self.listen is None else parse_address(self.listen)


class TelemetrySettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The recorded history of measurements, displayed in the console and used to back-test alert rules."""

    days: TelemetryDays = 30.0
    """Number of days after which one-minute values are removed. One-second values are kept for an hour and
    ten-second values for a day, but never longer than `days`."""


class RestartSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Restarts of replicas that have exited. The delay between restarts grows from 0.1 s to 5 s. After
    repeated exits, a replica is not restarted for a while: see [models.md](models.md#replicas)."""

    max_deaths: Positive = 5
    """Number of exits within `window_s` seconds after which a replica is not restarted for a while. The
    replica is restarted after `retry_s` seconds, when the model's files change, or when an operator runs
    `appliance models retry`."""
    window_s: PositiveSeconds = 60.0
    """Number of seconds for which an exit counts towards `max_deaths`. Only time spent serving is counted, so
    the limit also catches a replica that repeatedly exits during a slow load."""
    retry_s: PositiveSeconds = 300.0
    """Delay in seconds before a replica that has exited `max_deaths` times is restarted. If the replica exits
    again before it has served for `window_s` seconds, the delay starts over."""


class AutoscalingSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Adjusts the number of replicas of models that set `max_replicas`."""

    cooldown_s: Seconds = 30.0
    """For this many seconds after a change in the number of replicas, no replica is removed, and none is
    added because of late requests."""
    idle_s: Seconds = 300.0
    """How long the load must stay low before a replica is removed, in seconds."""


class AlertSettings(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Alerts. See [alerts.md](alerts.md) for the tables `[[alerts.rules]]` and `[[alerts.sinks]]` and the
    built-in rules."""

    disabled: list[str] = []
    """Names of built-in rules to turn off."""
    rules: list[AlertRule] = []
    """Additional rules. A rule with the name of a built-in rule replaces it."""
    sinks: list[AlertSink] = []
    """Receivers to notify when an alert is raised or ends, in addition to the service's log."""


class LimitSettings(Limits, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Limits on the connections and requests that a front process accepts."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The settings at the top level of a settings file, outside any table."""

    models: dict[str, ModelSettings] = {}
    """The served models, keyed by name."""
    prices: dict[str, ModelPrices] = {}
    """The prices, keyed by model name."""
    listen: str | None = None
    """Address (HOST:PORT) for TCP clients, which must send a bearer key. HOST is an IP address or localhost.
    Default: only the Unix socket and the sockets that systemd passes to the service."""
    fronts: Processes = 1
    """Number of front processes. More processes can stream more tokens per second."""
    run_dir: str = ""
    """Directory for the sockets. Default: `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/appliance` or
    `/tmp/appliance-UID`."""
    state_dir: str = ""
    """Directory for the databases. Default: `$STATE_DIRECTORY` or `$XDG_STATE_HOME/appliance`
    (`~/.local/state`)."""
    drain_grace_s: Seconds = 10.0
    """How long running requests may continue after SIGTERM, in seconds."""
    drain_notice_s: Seconds = 0.2
    """Delay in seconds between the start of a drain and the first refused request. During the delay,
    `/health/ready` already reports "not ready". Set it higher than your load balancer's health check
    interval."""
    hang_timeout_s: PositiveSeconds = 20.0
    """Time in seconds after which a ready replica or front process that does not report is killed. The
    process is then restarted, unless it was already stopping. If a replica has announced a long step, the
    limit is raised to ten times the step's predicted duration."""
    load_timeout_s: PositiveSeconds = 600.0
    """Time in seconds after which a starting replica or front process that reports no progress is killed and
    restarted."""
    log_level: LogLevel = "info"
    """Minimum level of logged messages."""
    unix: UnixSettings = UnixSettings()
    admin: AdminSettings = AdminSettings()
    groups: dict[str, GroupSettings] = {}
    """The model groups, keyed by name."""
    on_demand: OnDemandSettings = OnDemandSettings()
    queue: QueueSettings = QueueSettings()
    limits: LimitSettings = LimitSettings()
    idempotency: IdempotencySettings = IdempotencySettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    alerts: AlertSettings = AlertSettings()
    restarts: RestartSettings = RestartSettings()
    autoscaling: AutoscalingSettings = AutoscalingSettings()
    config_file: str = ""
    """Path of the main settings file. Not a setting."""

    @property
    def api_socket(self) -> Path:
        """The API's Unix socket."""
        return Path(self.run_dir) / "api.sock"

    @property
    def admin_socket(self) -> Path:
        """The Unix socket for operators."""
        return Path(self.run_dir) / "admin.sock"

    def address(self) -> tuple[str, int] | None:
        """Return `listen` as host and port, or None if it is not set."""
        return None if self.listen is None else parse_address(self.listen)


class Flags(msgspec.Struct, kw_only=True):
    """The command-line options. Options that were not given are None or empty."""

    config: str | None = None
    models: list[str] = []
    """Models, as FOLDER or NAME=FOLDER. If any are given, they replace the models in the settings files."""
    listen: str | None = None
    fronts: int | None = None
    run_dir: str | None = None
    state_dir: str | None = None
    log_level: LogLevel | None = None
    device: Device | None = None
    """Device that runs the models. Like all options below, this one applies to every model."""
    dtype: DType | None = None
    quantization: Quantization | None = None
    kv_cache_dtype: Quantization | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_blocks: int | None = None
    replicas: int | None = None
    load_format: LoadFormat | None = None


def parse_address(text: str) -> tuple[str, int]:
    """Parse HOST:PORT, with IPv6 addresses in brackets. Host names are rejected, because a DNS lookup would
    block the service. Raises ValueError for an invalid address."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ValueError(f"{text!r} is not HOST:PORT with an IP address or localhost as HOST") from None
    return host, int(port)
