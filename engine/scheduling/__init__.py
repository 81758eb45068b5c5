"""Scheduling: decides which sequences run in the next step and which KV blocks they hold, and reports their
results."""
