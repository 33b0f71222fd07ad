-- Workers land, retire and go; those that fail are set aside; those that cannot be spoken with are listed; and all of that can be watched.

-- While it shall land or retire: when what may not be interrupted is interrupted all the same. NULL: never, or that was done.
ALTER TABLE workers ADD COLUMN interrupt_at BIGINT;
-- While it shall land or retire: since when no lease is left that may not be interrupted.
ALTER TABLE workers ADD COLUMN landed_at BIGINT;
-- While it shall retire: even if that loses last replicas.
ALTER TABLE workers ADD COLUMN force_retire BOOLEAN NOT NULL DEFAULT FALSE;
-- While it shall retire: why it cannot, although no lease is left. Empty: nothing is known.
ALTER TABLE workers ADD COLUMN held_up_by TEXT NOT NULL DEFAULT '';
-- Its going is decided, and only its leases must still be ended: pruned, expired. NULL: it stays.
ALTER TABLE workers ADD COLUMN leaving TEXT;
-- It is gone for good once it is lost.
ALTER TABLE workers ADD COLUMN ephemeral BOOLEAN NOT NULL DEFAULT FALSE;
-- JSON: the versions that its gateway speaks, where none of them is spoken here. Empty list: one is.
ALTER TABLE workers ADD COLUMN unsupported_versions TEXT NOT NULL DEFAULT '[]';
-- How many attempts in a row ended there before their process had started, through its fault, and what the last one said.
ALTER TABLE workers ADD COLUMN failures BIGINT NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN last_failure TEXT NOT NULL DEFAULT '';
-- How often in a row it was set aside for that, and until when it is. NULL: it may be tried.
ALTER TABLE workers ADD COLUMN set_asides BIGINT NOT NULL DEFAULT 0;
ALTER TABLE workers ADD COLUMN set_aside_until BIGINT;
-- Of the last change of it that watchers hear of.
ALTER TABLE workers ADD COLUMN revision BIGINT NOT NULL DEFAULT 0;
CREATE INDEX workers_by_revision ON workers (revision);
CREATE INDEX workers_going ON workers (id) WHERE desired <> 'run' OR leaving IS NOT NULL;
CREATE INDEX workers_set_aside ON workers (set_aside_until) WHERE set_aside_until IS NOT NULL;

-- What hands revisions of workers out, in the order of commits: whoever changes a worker holds this row until it commits. Exactly one row.
CREATE TABLE worker_revisions (
    -- Always 1.
    id BIGINT PRIMARY KEY,
    -- The last one that was handed out.
    last BIGINT NOT NULL,
    -- Which workers have gone up to this one is forgotten.
    forgotten BIGINT NOT NULL
);
INSERT INTO worker_revisions (id, last, forgotten) VALUES (1, 1, 0);
UPDATE workers SET revision = 1;

-- Workers that have gone, for as long as somebody may ask.
CREATE TABLE gone_workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL,
    -- Of a worker that was retired: the one that may not register again. NULL: it may.
    marker_id UUID,
    -- retired, pruned, expired.
    how TEXT NOT NULL,
    gone_at BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    -- Whether the artifact store has forgotten it, too.
    store_told BOOLEAN NOT NULL
);
CREATE INDEX gone_workers_by_name ON gone_workers (name);
CREATE INDEX gone_workers_by_revision ON gone_workers (revision);
CREATE INDEX gone_workers_untold ON gone_workers (id) WHERE store_told = FALSE;

-- A workload may be interrupted when its worker goes.
ALTER TABLE workloads ADD COLUMN interruptible BOOLEAN NOT NULL DEFAULT FALSE;
-- JSON: on which workers attempts at it ended before its process had started, through their fault, and what was said.
ALTER TABLE workloads ADD COLUMN failed_on TEXT NOT NULL DEFAULT '[]';
