-- What a store that came out of a backup does not know: set aside until somebody decides.

-- Volumes and containers that workers hold and that have no row, of workers whose volumes are of another store life. A row goes when it is adopted or
-- purged, or when a report does not name it any more.
CREATE TABLE set_aside (
    -- Its name on the worker, minted by this store in another life. Sorts by age.
    handle UUID PRIMARY KEY,
    -- What it is.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container')),
    -- Where it is.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- When a report named it first.
    first_seen_at BIGINT NOT NULL,
    -- Only a report whose token is higher says that it is gone: the worker's sequence when its row was made.
    judged_after BIGINT NOT NULL,
    -- Whether its worker's gateway said what it knows of it: all that follows. Of containers it says nothing.
    described BOOLEAN NOT NULL,
    -- The volume that it is a copy-on-write child of.
    parent UUID,
    -- Whose it is. NULL: not known.
    team TEXT,
    -- The artifact whose bytes it held, or was to become. NULL: not known.
    artifact_id UUID,
    -- Digest of its tree. NULL: it has no final bytes, or that is not known.
    digest BYTEA,
    -- Bytes of its files, where the digest is known.
    size_bytes BIGINT NOT NULL
);
CREATE INDEX set_aside_by_worker ON set_aside (worker_id, handle);
CREATE INDEX set_aside_by_parent ON set_aside (parent) WHERE parent IS NOT NULL;

-- When it was adopted after it had been set aside. NULL: it was not.
ALTER TABLE volumes ADD COLUMN adopted_at BIGINT;
