"""Settings: a typed TOML file, flags over it, defaults under it.

Every mistake is named with its file, field, value and remedy.

    listen = "127.0.0.1:8000"
    fronts = 2

    [models.demo]
    folder = "/srv/models/demo"
    tensor_parallel_size = 2

    [unix]
    uids = [1000, 1001]

The file is the first of: `--config`, `$APPLIANCE_CONFIG`, `/etc/appliance/appliance.toml`,
`$XDG_CONFIG_HOME/appliance/appliance.toml`. Without one, defaults serve the shipped model on a Unix socket.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from appliance.messages import Limits
from engine.messages import ReplicaSpec

Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]
SocketMode = Annotated[str, msgspec.Meta(pattern="^0?[0-7]{3}$")]

SYSTEM_CONFIG = Path("/etc/appliance/appliance.toml")
DEMO_MODEL = "demo"

Part = TypeVar("Part", bound=msgspec.Struct)


class SettingsError(Exception):
    """A setting that cannot be used; the message says where it stands, what it is and what to do."""


class ModelSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`[models.NAME]`: a model that apps name, and how its replicas run."""

    folder: str
    """Folder of a Hugging Face checkpoint; relative to the settings file (or, by flag, to where you are)."""
    replicas: Positive = 1
    """Running copies."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """"auto" is CUDA where there is one, else the CPU."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """"auto" is the checkpoint's on CUDA, float32 on the CPU."""
    weights: Literal["auto", "fp8"] = "auto"
    """Of the layers' matrices: "auto" is as the checkpoint has them, "fp8" quantises them while they load."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Of the KV cache: "auto" is the model's, "fp8" halves it."""
    tensor_parallel_size: Positive = 1
    """Ranks (GPUs) that hold one replica together."""
    max_model_len: Positive | None = None
    """Longest sequence in tokens, prompt and output together; without it, the checkpoint's."""
    max_rows: Positive = 64
    """Sequences that run at once in one replica."""
    step_tokens: Positive = 2048
    """Token budget of one step."""
    mixed_tokens: Positive | None = None
    """Token budget of a step in which sequences decode: less makes the time between tokens shorter while
    prompts are computed, and these slower; without it 4096, at most `step_tokens`."""
    kv_blocks: Positive | None = None
    """Blocks of 64 tokens in the KV cache; without it, sized from memory."""
    memory_fraction: Fraction = 0.95
    """Part of the device's memory that may be used."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """"dummy" makes random weights: for measuring speed without a checkpoint's files."""
    prefix_cache: bool = True
    """Whether equal beginnings of prompts are computed once."""
    threads: Positive | None = None
    """CPU threads per rank; without it, the cores divided by the ranks."""

    def spec(self, replica: str) -> ReplicaSpec:
        """What a replica of this model is told."""
        return ReplicaSpec(
            replica=replica,
            model_path=self.folder,
            load_format=self.load_format,
            device=self.device,
            dtype=self.dtype,
            weights=self.weights,
            kv_dtype=self.kv_dtype,
            tensor_parallel_size=self.tensor_parallel_size,
            max_model_len=self.max_model_len,
            max_rows=self.max_rows,
            step_tokens=self.step_tokens,
            mixed_tokens=self.mixed_tokens,
            kv_blocks=self.kv_blocks,
            memory_fraction=self.memory_fraction,
            prefix_cache=self.prefix_cache,
            threads=self.threads,
        )


class UnixSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`[unix]`: who may use the sockets in the run directory."""

    uids: Literal["owner", "any"] | list[int] = "owner"
    """Who may ask on `api.sock`: "owner" (the service's own user, and root), "any" (whoever the file mode
    lets in), or a list of numeric user ids (besides the owner and root)."""
    api_mode: SocketMode = "0660"
    """File mode of `api.sock`, octal."""
    admin_mode: SocketMode = "0600"
    """File mode of `admin.sock`, octal. Whatever it is, only the service's own user and root are answered."""


class QueueSettings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """`[queue]`: requests that wait for their turn."""

    limit: Positive = 2048
    """The most requests that wait; more are refused with 503 and `Retry-After`."""
    timeout_s: Seconds = 120.0
    """A request that has waited this long is refused with 503."""


class LimitSettings(Limits, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`[limits]`: what a front takes from a client (fields and defaults of `appliance.messages.Limits`)."""


class Settings(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole of it."""

    models: dict[str, ModelSettings] = {}
    """By the name that apps use. Without any: the shipped model, named "demo"."""
    listen: str | None = None
    """HOST:PORT for TCP, where a bearer key is needed; without it there is only the Unix socket."""
    fronts: Positive = 1
    """Front processes: more for more streamed tokens per second."""
    run_dir: str = ""
    """Where the sockets are; `$RUNTIME_DIRECTORY`, `$XDG_RUNTIME_DIR/appliance` or `/tmp/appliance-UID`."""
    state_dir: str = ""
    """Where the databases are; `$STATE_DIRECTORY` or `$XDG_STATE_HOME/appliance` (`~/.local/state`)."""
    drain_grace_s: Seconds = 10.0
    """On SIGTERM, running requests get this long to finish."""
    hang_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0
    """A ready replica or front that gives no sign of life for this long is killed and started anew."""
    load_timeout_s: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    """A replica that starts or loads and reports no progress for this long is killed and started anew."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    unix: UnixSettings = UnixSettings()
    queue: QueueSettings = QueueSettings()
    limits: LimitSettings = LimitSettings()
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
    """NAME=FOLDER each; they replace the file's models."""
    listen: str | None = None
    fronts: int | None = None
    run_dir: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    device: str | None = None
    """These change every model."""
    dtype: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    tensor_parallel_size: int | None = None
    max_model_len: int | None = None
    max_rows: int | None = None
    step_tokens: int | None = None
    kv_blocks: int | None = None
    load_format: str | None = None


_FLAGS_OF_SERVICE = ("listen", "fronts", "run_dir", "state_dir", "log_level")
_FLAGS_OF_MODELS = (
    "device",
    "dtype",
    "weights",
    "kv_dtype",
    "tensor_parallel_size",
    "max_model_len",
    "max_rows",
    "step_tokens",
    "kv_blocks",
    "load_format",
)


def load_settings(flags: Flags | None = None, environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings file, lay the flags over it and fill in what neither says.

    Raises SettingsError for whatever cannot be used, before anything is started.
    """
    flags = flags or Flags()
    path = find_config(flags.config, environ)
    table = _read(path) if path else {}
    source = str(path) if path else "the defaults"
    _anchor_folders(table, path)
    settings = _convert_file(table, source)
    settings.config_file = str(path or "")
    _apply(settings, flags)
    if not settings.models:
        settings.models = {DEMO_MODEL: _with_flags(ModelSettings(folder=str(demo_model_folder())), flags)}
    settings.run_dir = os.path.abspath(settings.run_dir or default_run_dir(environ))
    settings.state_dir = os.path.abspath(settings.state_dir or default_state_dir(environ))
    _check(settings, source)
    return settings


def find_config(flag: str | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The settings file, None if there is none. Raises SettingsError if one is named that does not exist."""
    for named, by in ((flag, "--config"), (environ.get("APPLIANCE_CONFIG"), "$APPLIANCE_CONFIG")):
        if named:
            path = Path(named).absolute()
            if not path.is_file():
                raise SettingsError(f"{by} names {path}, which is not a file: write it or name another one")
            return path
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(
        environ.get("HOME") or os.path.expanduser("~"), ".config"
    )
    for path in (SYSTEM_CONFIG, Path(home) / "appliance" / "appliance.toml"):
        if path.is_file():
            return path
    return None


def default_run_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Where the sockets are when nobody says otherwise."""
    if environ.get("RUNTIME_DIRECTORY"):
        return environ["RUNTIME_DIRECTORY"].split(":")[0]
    if environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(environ["XDG_RUNTIME_DIR"], "appliance")
    return f"/tmp/appliance-{os.geteuid()}"


def default_state_dir(environ: Mapping[str, str] = os.environ) -> str:
    """Where the databases are when nobody says otherwise."""
    if environ.get("STATE_DIRECTORY"):
        return environ["STATE_DIRECTORY"].split(":")[0]
    home = environ.get("HOME") or os.path.expanduser("~")
    return os.path.join(environ.get("XDG_STATE_HOME") or os.path.join(home, ".local", "state"), "appliance")


def demo_model_folder() -> Path:
    """The checkpoint that ships with the product."""
    return Path(__file__).resolve().with_name("demo_model")


def parse_address(text: str) -> tuple[str, int]:
    """HOST:PORT, IPv6 hosts in brackets. Raises SettingsError."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not 0 <= int(port) <= 65535:
        raise SettingsError(
            f"listen = {text!r} is not HOST:PORT: write for example 127.0.0.1:8000 or [::1]:8000"
        )
    return host, int(port)


# ── the file ─────────────────────────────────────────────────────────────────────────────────────


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8 text ({error}): TOML files are") from error
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from error


def _anchor_folders(table: dict[str, Any], path: Path | None) -> None:
    models = table.get("models")
    if path is None or not isinstance(models, dict):
        return
    for model in models.values():
        if isinstance(model, dict) and isinstance(model.get("folder"), str):
            model["folder"] = str(path.parent / os.path.expanduser(model["folder"]))


def _convert_file(table: dict[str, Any], source: str) -> Settings:
    if "config_file" in table:
        raise SettingsError(f"{source}: config_file is not a setting: remove it")
    table = dict(table)
    models = table.pop("models", {})
    if not isinstance(models, dict):
        raise SettingsError(f"{source}: models = {models!r} must be tables: write [models.NAME]")
    settings = _convert(table, Settings, source, "")
    # One by one, so that a mistake's path names the model.
    settings.models = {
        name: _convert(model, ModelSettings, source, f"models.{name}") for name, model in models.items()
    }
    return settings


def _convert(value: Any, part: type[Part], source: str, prefix: str) -> Part:
    try:
        return msgspec.convert(value, part)
    except msgspec.ValidationError as error:
        raise SettingsError(f"{source}: {_explain(str(error), value, part, prefix)}") from error


def _explain(message: str, value: Any, part: type[msgspec.Struct], prefix: str) -> str:
    """msgspec's message with the path in TOML's words, the value found and what to do."""
    what, _, where = message.partition(" - at ")
    path = [piece for piece in where.strip("`").removeprefix("$").split(".") if piece]
    field = ".".join(filter(None, [prefix, *path])) or "the file"
    unknown = re.match(r"Object contains unknown field `(.*)`", what)
    if unknown:
        known = _fields_at(part, path)
        near = get_close_matches(unknown[1], known, 1)
        remedy = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        return f"{'.'.join(filter(None, [prefix, *path, unknown[1]]))} is not a setting: {remedy}"
    missing = re.match(r"Object missing required field `(.*)`", what)
    if missing:
        return f"{field} lacks {missing[1]!r}: add it"
    found: Any = value
    for piece in path:
        name, *indices = piece.replace("]", "").split("[")
        found = found.get(name) if isinstance(found, dict) else found
        for index in indices:
            found = found[int(index)] if isinstance(found, list) and index.isdecimal() else found
    words = _words_at(part, path) if "enum value" in what else []
    if field.endswith("_mode"):
        return f'{field} = {found!r} cannot be used: write a file mode in octal, such as "0660"'
    remedy = f"it can be {', '.join(words)}" if words else f"{what[0].lower()}{what[1:]}"
    return f"{field} = {found!r} cannot be used: {remedy}"


def _words_at(part: type[msgspec.Struct], path: list[str]) -> list[str]:
    """The words that a field of literals takes."""
    for piece in path:
        inner = next((f.type for f in msgspec.structs.fields(part) if f.name == piece), None)
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            part = inner
            continue
        words, types = [], [inner]
        while types:
            kind = types.pop()
            words += [repr(word) for word in get_args(kind) if isinstance(word, str)]
            types += [argument for argument in get_args(kind) if get_origin(argument) is not None]
            if get_origin(kind) is list:
                words.append("a list")
        return words
    return []


def _fields_at(part: type[msgspec.Struct], path: list[str]) -> list[str]:
    for piece in path:
        inner = next((f.type for f in msgspec.structs.fields(part) if f.name == piece), None)
        if not (isinstance(inner, type) and issubclass(inner, msgspec.Struct)):
            break
        part = inner
    return [field for field in part.__struct_fields__ if field != "config_file"]


# ── flags and checks ─────────────────────────────────────────────────────────────────────────────


def _apply(settings: Settings, flags: Flags) -> None:
    for name in _FLAGS_OF_SERVICE:
        value = getattr(flags, name)
        if value is not None:
            setattr(settings, name, value)
    if flags.models:
        settings.models = {}
        for text in flags.models:
            name, equals, folder = text.partition("=")
            if not equals or not name or not folder:
                raise SettingsError(
                    f"--model {text!r} is not NAME=FOLDER: write for example --model chat=/srv/chat"
                )
            if name in settings.models:
                raise SettingsError(f"--model names {name!r} twice: give each model its own name")
            settings.models[name] = ModelSettings(folder=os.path.abspath(os.path.expanduser(folder)))
    settings.models = {name: _with_flags(model, flags) for name, model in settings.models.items()}
    converted = _convert(msgspec.to_builtins(settings), Settings, "the command line", "")
    for name in settings.__struct_fields__:
        setattr(settings, name, getattr(converted, name))


def _with_flags(model: ModelSettings, flags: Flags) -> ModelSettings:
    changes = {name: getattr(flags, name) for name in _FLAGS_OF_MODELS if getattr(flags, name) is not None}
    table = msgspec.to_builtins(model) | changes
    return _convert(table, ModelSettings, "the command line", "")


def _check(settings: Settings, source: str) -> None:
    for name, model in settings.models.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}", name):
            raise SettingsError(
                f"{source}: models.{name!r}: a model's name begins with a letter or digit and goes on with "
                f"those or any of . _ : / @ + - (at most 128)"
            )
        if not os.path.isdir(model.folder):
            raise SettingsError(
                f"models.{name}.folder = {model.folder!r} is not a folder: name the folder of a Hugging Face "
                f"checkpoint (config.json, tokenizer.json, *.safetensors)"
            )
    settings.address()
