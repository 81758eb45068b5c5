"""The engine's benchmark, `python -m engine.bench`. It runs named workloads and compares each result with the
device's limit."""
