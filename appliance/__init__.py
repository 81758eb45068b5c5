"""The service: fronts speak HTTP and text, the core decides, replicas compute (docs/architecture.md)."""
