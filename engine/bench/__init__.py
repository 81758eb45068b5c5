"""The engine's benchmark: `python -m engine.bench`. The workloads by name, ours beside the physical limit."""
