-- Workers that take nothing but what they are kept free for, so that what asks for much is not passed over for ever.

CREATE TABLE kept_free (
    worker_id UUID NOT NULL PRIMARY KEY,
    -- What a workload or call that waits is called in the queue.
    waits_as UUID NOT NULL,
    -- Until then, unless a replica where it waits says so again.
    expires_at BIGINT NOT NULL
);
