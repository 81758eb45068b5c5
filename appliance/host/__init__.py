"""Operating system helpers shared by the service's processes."""
