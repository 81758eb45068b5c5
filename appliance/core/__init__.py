"""The core process: its parts, startup, reloads and shutdown."""
