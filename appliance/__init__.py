"""The service: front processes serve HTTP and convert between text and tokens, the core admits and dispatches
requests, and replicas run the models (docs/architecture.md)."""
