"""The core process: its parts and their startup, reload and shutdown."""
