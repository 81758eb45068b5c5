"""The part of the core that starts the front processes, configures them and hands connections to them."""
