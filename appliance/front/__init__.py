"""The front process, which parses HTTP requests and converts between text and tokens. It runs unprivileged,
and no other process parses data from API clients."""
