"""The event stream: the frames that carry snapshots of the service, and the client that reads them."""
