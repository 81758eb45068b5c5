"""Scheduling: which sequences run in the next step, which KV blocks they hold, and what is reported about
them."""
