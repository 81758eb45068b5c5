"""The step profiler, `python -m engine.profile`."""
