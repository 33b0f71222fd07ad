-- Why caches that are gone went, and what is set aside of an artifact.

-- Volumes, containers and caches that are gone, so that somebody may ask why.
CREATE TABLE new_graves (
    -- The handle or id that it had.
    id UUID PRIMARY KEY,
    -- What it was.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container', 'resource_cache', 'task_cache')),
    -- Who may ask. NULL: everybody.
    team TEXT,
    -- What a cache was called, for people. Empty: it had no name.
    label TEXT NOT NULL,
    -- Why it was marked, or went, for people.
    marked_why TEXT,
    -- When it was marked. NULL: it went at once, or that is not known.
    marked_at BIGINT,
    -- When a report did not name it any more, or when the cache went.
    gone_at BIGINT NOT NULL,
    -- When to look whether it can be forgotten.
    look_at BIGINT NOT NULL
);
INSERT INTO new_graves (id, kind, label, marked_why, marked_at, gone_at, look_at)
    SELECT id, kind, '', marked_why, marked_at, gone_at, look_at FROM graves;
DROP TABLE graves;
ALTER TABLE new_graves RENAME TO graves;
CREATE INDEX graves_to_look_at ON graves (look_at);

CREATE INDEX set_aside_by_artifact ON set_aside (artifact_id) WHERE artifact_id IS NOT NULL;
