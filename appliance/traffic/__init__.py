"""Traffic management: quotas, queues, replica credits and the request manager. Together, these parts decide
which requests run, and in what order."""
