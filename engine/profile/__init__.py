"""The step profiler, `python -m engine.profile`. (`engine.profiling` measures memory during a start.)"""
