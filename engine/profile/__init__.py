"""Where the time of steps goes: `python -m engine.profile`. (Memory before a start is `engine.profiling`.)"""
