"""The engine's benchmark, `python -m engine.bench`: runs named workloads and compares each result with the
device's limit."""
