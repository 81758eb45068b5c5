"""Traffic management: decides which requests run, and in what order, based on quotas, queues and replica
credits."""
