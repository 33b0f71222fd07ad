-- Marks are written where they are read: beside the rows that they are of, in queues of their own, and not into indexes of everything.
--
-- A row whose change touches no indexed column is changed in its place where its page has room (PostgreSQL: a heap-only tuple), and no index is
-- written. So no index of `artifacts` or `volumes` has a column, or a condition on one, that changes when a row is marked.

-- Deleted artifacts. Whoever adds or takes away a row has locked the artifact.
CREATE TABLE tombstones (
    -- The artifact.
    artifact_id UUID PRIMARY KEY,
    -- When to look whether its replicas, or it, can go.
    look_at BIGINT NOT NULL
);
INSERT INTO tombstones SELECT artifact_id, COALESCE(look_at, 0) FROM artifacts WHERE state = 'deleting';
CREATE INDEX tombstones_to_look_at ON tombstones (look_at);
-- `artifacts.look_at` is of artifacts that are not deleted.
UPDATE artifacts SET look_at = NULL WHERE state = 'deleting';
DROP INDEX artifacts_to_empty;
DROP INDEX artifacts_to_look_at;
CREATE INDEX artifacts_to_look_at ON artifacts (look_at) WHERE look_at IS NOT NULL;
DROP INDEX artifacts_by_digest;
CREATE INDEX artifacts_by_digest ON artifacts (team, digest) WHERE digest IS NOT NULL;

-- Volumes that are destroying or sweeping. A row comes with the mark, and goes with it, or with the volume.
CREATE TABLE marks (
    -- Where the volume is.
    worker_id UUID NOT NULL,
    -- The volume.
    handle UUID NOT NULL,
    -- The volume's `judged_after`, once its gateway was told: a stream reads on where it was. NULL: it was not.
    number BIGINT,
    PRIMARY KEY (worker_id, handle)
);
INSERT INTO marks SELECT worker_id, handle, CASE WHEN state = 'sweeping' THEN judged_after END
    FROM volumes WHERE state IN ('destroying', 'sweeping');
CREATE INDEX marks_told ON marks (worker_id, number, handle) WHERE number IS NOT NULL;
DROP INDEX volumes_marked;
DROP INDEX volumes_sweeping;

-- Whether it is garbage in whose place another may be made: of its name in its attempt, by its transfer, or as the copy of its artifact. Garbage
-- whose attempt or transfer has ended is in nobody's way, and need not say so.
ALTER TABLE volumes ADD COLUMN given_up BOOLEAN NOT NULL DEFAULT FALSE;
UPDATE volumes SET given_up = TRUE WHERE state IN ('destroying', 'sweeping');
DROP INDEX volumes_one_of_name;
CREATE UNIQUE INDEX volumes_one_of_name ON volumes (attempt_id, name) WHERE attempt_id IS NOT NULL AND given_up = FALSE;
DROP INDEX volumes_one_of_transfer;
CREATE UNIQUE INDEX volumes_one_of_transfer ON volumes (transfer_id) WHERE transfer_id IS NOT NULL AND given_up = FALSE;
DROP INDEX volumes_one_copy;
CREATE UNIQUE INDEX volumes_one_copy ON volumes (artifact_id, worker_id) WHERE is_copy = TRUE AND complete = FALSE AND given_up = FALSE;
DROP INDEX volumes_claimed;
CREATE INDEX volumes_claimed ON volumes (claimed_until) WHERE complete = FALSE AND claimed_until IS NOT NULL AND given_up = FALSE;
DROP INDEX volumes_newly_lost;
CREATE INDEX volumes_newly_lost ON volumes (lost_at) WHERE lost_at IS NOT NULL AND loss_noticed = FALSE;

-- Room for what changes in its place: a mark adds its instant and its reason to the row, and ten neighbours may be marked at once.
-- postgres: ALTER TABLE artifacts SET (fillfactor = 65);
-- postgres: ALTER TABLE volumes SET (fillfactor = 60);
