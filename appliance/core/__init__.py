"""The core process: what it is made of, its start, its reloads and its end."""
