"""A stand-in for a check process. It prints the check's name after a delay."""

from __future__ import annotations

import json
import os
import sys
import time


def note(word: str) -> None:
    if path := os.environ.get("CHECK_LOG"):
        with open(path, "a") as log:
            print(word, file=log)


if __name__ == "__main__":
    note("begin")
    given = json.load(sys.stdin)
    time.sleep(float(os.environ.get("CHECK_SECONDS", "0.3")))
    note("end")
    print(json.dumps(given["check"]), end="")
