"""A pytest plugin that distributes a file's tests over several processes. For example, `-p tests.share
--share 2/3` runs every third test, starting with the second one."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", metavar="K/N", default="1/1", help="every N-th test, from the K-th of 1 to N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share = config.getoption("--share")
    which, shares = map(int, share.split("/"))
    if not 1 <= which <= shares:
        raise pytest.UsageError(f"--share is {share}: give K/N with K from 1 to N")
    chosen = items[which - 1 :: shares]
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = chosen
