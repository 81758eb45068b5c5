"""Traffic management: quotas, queues, replica credits and the request manager, which together decide the
order in which requests run."""
