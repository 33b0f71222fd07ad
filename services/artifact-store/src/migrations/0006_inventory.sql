-- What is used interactively, and what is lost.

-- When it was last used interactively. NULL: never.
ALTER TABLE containers ADD COLUMN touched_at BIGINT;
-- Since when reports do not name it. NULL: it is not lost.
ALTER TABLE containers ADD COLUMN lost_at BIGINT;
-- Whether the loss is in `losses`.
ALTER TABLE containers ADD COLUMN loss_noticed BOOLEAN NOT NULL DEFAULT FALSE;
-- As for containers.
ALTER TABLE volumes ADD COLUMN lost_at BIGINT;
-- As for containers.
ALTER TABLE volumes ADD COLUMN loss_noticed BOOLEAN NOT NULL DEFAULT FALSE;
-- What was lost before is noticed now: not known since when, and not before it was made.
UPDATE containers SET lost_at = created_at WHERE state = 'lost';
UPDATE volumes SET lost_at = created_at WHERE state = 'lost';
CREATE INDEX containers_newly_lost ON containers (lost_at) WHERE state = 'lost' AND loss_noticed = FALSE;
CREATE INDEX volumes_newly_lost ON volumes (lost_at) WHERE state = 'lost' AND loss_noticed = FALSE;

-- The revision of the newest loss. Raised under this row's lock, so revisions become visible in their order.
ALTER TABLE store ADD COLUMN losses BIGINT NOT NULL DEFAULT 0;
-- The revision of the newest loss that is forgotten.
ALTER TABLE store ADD COLUMN losses_forgotten BIGINT NOT NULL DEFAULT 0;

-- What was lost: it should have been on a worker, and was not reported for longer than a grace, or its worker is gone for good. Forgotten after a
-- while.
CREATE TABLE losses (
    -- Its place in the order. Rises by one.
    revision BIGINT PRIMARY KEY,
    -- Where it was. Not a foreign key: the worker may be forgotten.
    worker_id UUID NOT NULL,
    -- The volume. NULL: a container was lost.
    volume UUID,
    -- The container. NULL: a volume was lost.
    container UUID CHECK ((volume IS NULL) <> (container IS NULL)),
    -- The artifact whose bytes it held or was to hold. NULL: none.
    artifact_id UUID,
    -- The attempt that it was made for. NULL: none.
    attempt_id UUID,
    -- Since when reports did not name it.
    lost_at BIGINT NOT NULL,
    -- When it was noticed.
    noticed_at BIGINT NOT NULL
);
CREATE INDEX losses_by_age ON losses (noticed_at);
