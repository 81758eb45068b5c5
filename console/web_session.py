"""`python -m console.web_session`: runs one browser tab's console, which is always read-only. Started by
`console.web`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from console.app import ConsoleApp
from console.keymap import read_keymap
from console.source import SnapshotSource


def main() -> None:
    """Run the console over textual-serve's pipes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--theme", default="dark")
    parser.add_argument("--keys")
    flags = parser.parse_args()
    source = _source(flags.run_dir, demo=flags.demo)
    ConsoleApp(source, write=False, theme=flags.theme, keymap=read_keymap(flags.keys)).run()


def _source(run_dir: Path | None, *, demo: bool) -> SnapshotSource:
    if demo or run_dir is None:
        from console.fake import FakeSource

        return FakeSource()
    from console.live import LiveSource

    return LiveSource(run_dir, write=False, key=os.environ.get("APPLIANCE_ADMIN_KEY"))


if __name__ == "__main__":
    main()
