"""Schedules sequences and KV blocks: plans which sequences run in each step, allocates their blocks, and
processes the results."""
