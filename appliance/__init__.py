"""The service: front processes handle HTTP and text, the core makes the decisions, and replicas run the
models (docs/architecture.md)."""
