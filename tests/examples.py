"""The number of examples that property tests draw: few in `scripts/test` and many in `scripts/soak`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

QUICK_EXAMPLES = 100
"""Default number of examples for a property test. `scripts/soak` draws 20 times as many."""
SOAK_EXAMPLES = 20 * QUICK_EXAMPLES


def examples(count: int, **options: Any) -> settings:
    """Return the settings for a property test that draws `count` examples, or 20 times as many in
    `scripts/soak`."""
    return settings(max_examples=count * settings.default.max_examples // QUICK_EXAMPLES, **options)
