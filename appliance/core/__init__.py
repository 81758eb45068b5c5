"""The core process: its components, and how they are started, reloaded and stopped."""
