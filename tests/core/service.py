"""The real core with fake fronts and replicas: `python -m tests.core.service SETTINGS.toml`.

A busy machine may pause a process for several seconds. Fronts and replicas therefore count as silent only
after SILENT_AFTER_S seconds, an environment variable whose default is longer than any test."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import partial

import uvloop

from appliance.core.process import serve
from appliance.core.systemd import Manager
from appliance.front_pool import front
from appliance.host.logs import configure_logging
from appliance.models import replica_heartbeat
from appliance.models.preflight import ModelFinding
from appliance.models.preflight_process import ModelChecks
from appliance.settings import Flags, ModelSettings, read_settings
from engine.client import ReplicaGroup


def check_folders(models: Mapping[str, ModelSettings]) -> dict[str, list[ModelFinding]]:
    """Check only whether the folders exist, because fake replicas need no checkpoints."""
    missing = ModelFinding(level="problem", text="the folder does not exist", remedy="create it")
    return {name: [] if os.path.isdir(model.folder) else [missing] for name, model in models.items()}


def main() -> None:
    read = partial(read_settings, Flags(config=sys.argv[1]))
    configure_logging("info")
    front._QUIET_S = replica_heartbeat.SILENT_AFTER_S = float(os.environ.get("SILENT_AFTER_S", "600"))
    launch = partial(ReplicaGroup.launch, module="tests.core.fake_replica")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(
                read(),
                reread=read,
                manager=Manager(),
                launch=launch,
                front_module="tests.core.fake_front",
                checks=ModelChecks(files=check_folders, everything=check_folders),
            )
        )


if __name__ == "__main__":
    main()
