-- What gateways were told to destroy, in the order in which they were told, so that a stream reads on where it was.

-- `judged_after` of what is sweeping is a number that was minted when its gateway was told, the last time: `workers.sequence` is
-- raised for that. `workers.reported` is the token of the newest report whose judging began; no older one judges any more.
CREATE INDEX volumes_sweeping ON volumes (worker_id, judged_after, handle) WHERE state = 'sweeping';
CREATE INDEX containers_sweeping ON containers (worker_id, judged_after, handle) WHERE state = 'sweeping';
