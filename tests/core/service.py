"""The real core with fake fronts and replicas: `python -m tests.core.service SETTINGS.toml`."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import uvloop

from appliance.core.process import serve
from appliance.core.systemd import Manager
from appliance.logs import configure_logging
from appliance.settings import Flags, read_settings
from engine.client import ReplicaGroup


def main() -> None:
    read = partial(read_settings, Flags(config=sys.argv[1]))
    configure_logging("info")
    launch = partial(ReplicaGroup.launch, module="tests.core.fake_replica")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(
            serve(read(), reread=read, manager=Manager(), launch=launch, front_module="tests.core.fake_front")
        )


if __name__ == "__main__":
    main()
