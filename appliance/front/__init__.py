"""The front process, which parses HTTP requests and converts between text and tokens. It is unprivileged, and
the only process that parses data from API clients."""
