"""Traffic management: decides in which order requests run. Contains quotas, queues, the replicas' credits and
the request manager."""
