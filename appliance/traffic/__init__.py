"""Traffic: who runs when. The queue, the replicas' credits and the ledger of requests in flight."""
