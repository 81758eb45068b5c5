"""The front role: HTTP and text. Stateless and unprivileged, the only process that reads hostile bytes."""
