"""The core process: its components, and their startup, reload and shutdown."""
