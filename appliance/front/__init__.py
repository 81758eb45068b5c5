"""The front process, which handles HTTP and text. It is unprivileged, and no other process parses bytes from
clients."""
