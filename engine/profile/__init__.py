"""The step profiler, `python -m engine.profile`. The similarly named `engine.profiling` measures memory at
start."""
