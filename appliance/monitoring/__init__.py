"""Checks the server and the service (`doctor`) and exports metrics."""
