"""The engine's benchmark, `python -m engine.bench`: named workloads, with results as a fraction of the
device's limit."""
