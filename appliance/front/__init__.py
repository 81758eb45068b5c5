"""The front process, which parses HTTP requests and converts between text and tokens. It is unprivileged, and
no other process parses bytes from API clients."""
