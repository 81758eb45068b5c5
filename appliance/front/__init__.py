"""The front process, which parses HTTP requests and converts between text and tokens. It is unprivileged, and
it is the only process that parses data sent by API clients."""
