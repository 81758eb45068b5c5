"""The messages between the core and the front processes, and the types that both use."""
