"""The real core with fake fronts and replicas: `python -m tests.core.service SETTINGS.toml`."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

import uvloop

from appliance.core import serve
from appliance.logs import configure_logging
from appliance.settings import Flags, load_settings
from engine.client import ReplicaGroup


def main() -> None:
    settings = load_settings(Flags(config=sys.argv[1]))
    configure_logging("info")
    launch = partial(ReplicaGroup.launch, module="tests.core.fake_replica")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(settings, launch=launch, front_module="tests.core.fake_front"))


if __name__ == "__main__":
    main()
