"""The front process: HTTP and text. It is unprivileged, and the only process that parses clients' bytes."""
