"""The core process: its components, and how to start, reload and stop them."""
