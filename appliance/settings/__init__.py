"""Typed settings from TOML files. Command-line flags override the files, and the files override the defaults.
Every fault is reported with its file, line, setting, value and remedy.

    listen = "127.0.0.1:8000"
    fronts = 2

    [models.demo]
    folder = "/srv/models/demo"
    tensor_parallel_size = 2

    [unix]
    uids = [1000, 1001]

The main file is named by `--config` or `$APPLIANCE_CONFIG`. Without either, it is
`/etc/appliance/appliance.toml` or, if that does not exist, `$XDG_CONFIG_HOME/appliance/appliance.toml`. The
files `conf.d/*.toml` next to it override it and are applied in alphabetical order. Tables are merged; other
values are replaced. If there is no file, the defaults serve the shipped model on a Unix socket.
"""

from appliance.settings.faults import Fault, Place, SettingsError, dotted
from appliance.settings.fields import (
    DEMO_MODEL,
    AdminSettings,
    AlertSettings,
    AutoscalingSettings,
    Flags,
    GroupSettings,
    LimitSettings,
    LogSettings,
    ModelPrices,
    ModelSettings,
    QueueSettings,
    RestartSettings,
    Settings,
    UnixSettings,
    parse_address,
)
from appliance.settings.files import SYSTEM_CONFIG, find_config, read_tables
from appliance.settings.load import (
    Loaded,
    default_run_dir,
    default_state_dir,
    demo_model_folder,
    load_settings,
    model_name_of,
    named_folder,
    read_alert_settings,
    read_settings,
)

__all__ = [
    "DEMO_MODEL",
    "SYSTEM_CONFIG",
    "AdminSettings",
    "AlertSettings",
    "AutoscalingSettings",
    "Fault",
    "Flags",
    "GroupSettings",
    "LimitSettings",
    "Loaded",
    "LogSettings",
    "ModelPrices",
    "ModelSettings",
    "Place",
    "QueueSettings",
    "RestartSettings",
    "Settings",
    "SettingsError",
    "UnixSettings",
    "default_run_dir",
    "default_state_dir",
    "demo_model_folder",
    "dotted",
    "find_config",
    "load_settings",
    "model_name_of",
    "named_folder",
    "parse_address",
    "read_alert_settings",
    "read_settings",
    "read_tables",
]
