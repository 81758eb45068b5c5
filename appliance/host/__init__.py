"""Uses of the operating system that several processes of the service share."""
