"""The messages between the core and the front processes, and their shared types."""
