"""Python's garbage collector in a process that steps."""

from __future__ import annotations

import gc


def settle_garbage() -> None:
    """Once, when a model is loaded: collections that come later find little to walk over.

    What the load left is permanent: walking over it takes 0.1 s. Nor are all running sequences walked over
    every few steps, which took 30 ms with a thousand of them: what a step leaves behind is freed by its
    reference counts.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
