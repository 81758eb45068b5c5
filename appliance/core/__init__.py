"""The core process: its parts, its start, its reloads and its end."""
