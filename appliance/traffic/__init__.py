"""Traffic management: quotas, queues, replica credits and the request manager. Together they decide which
requests run, and in what order."""
