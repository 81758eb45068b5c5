"""Traffic: the order in which requests run. Quotas, queues, the replicas' credits and the request manager."""
