"""The core's view of the front processes: starts them, configures them and hands connections to them."""
