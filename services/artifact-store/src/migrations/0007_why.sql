-- When things were marked, and why things that are gone went.

-- When it was marked. NULL: it was not, or before this was written down.
ALTER TABLE volumes ADD COLUMN marked_at BIGINT;
-- The state that it was marked in: a replica comes back to it with its artifact. `unconfirmed` instead of `created` once a new incarnation
-- of its worker began. NULL: it was not marked, or before this was written down.
ALTER TABLE volumes ADD COLUMN marked_from TEXT;
-- As for volumes.
ALTER TABLE containers ADD COLUMN marked_at BIGINT;

-- Volumes and containers that are gone, so that somebody may ask why.
CREATE TABLE graves (
    -- The handle that it had.
    id UUID PRIMARY KEY,
    -- What it was.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container')),
    -- Why it was marked, for people.
    marked_why TEXT,
    -- When it was marked.
    marked_at BIGINT,
    -- When a report did not name it any more.
    gone_at BIGINT NOT NULL,
    -- When to look whether it can be forgotten.
    look_at BIGINT NOT NULL
);
CREATE INDEX graves_to_look_at ON graves (look_at);
