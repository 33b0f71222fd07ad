-- The artifact store's schema, for PostgreSQL and SQLite alike.
--
-- Instants are microseconds since 1970 (UTC). Sizes are bytes. Digests are 32 bytes (BLAKE3). Ids are UUIDs.

-- What this database is. One row.
CREATE TABLE store (
    -- Always 1.
    id BIGINT PRIMARY KEY CHECK (id = 1),
    -- The life of this database. A restored backup begins a new one, so that what it does not know is not swept.
    life UUID NOT NULL
);

-- Who was last heard to speak for each worker. All that workers hold is fenced by these rows.
CREATE TABLE workers (
    -- The worker, as the scheduler names it.
    worker_id UUID PRIMARY KEY,
    -- The highest life of what it holds that has spoken.
    incarnation BIGINT NOT NULL,
    -- The highest session of that incarnation that has spoken. Lower ones are refused.
    session BIGINT NOT NULL,
    -- Counts reports and incarnations: a report's token is the value at its beginning. Only rises.
    sequence BIGINT NOT NULL,
    -- The token of the last report that was judged. 0: none yet.
    reported BIGINT NOT NULL
);

-- Names for bytes that somebody cares about.
CREATE TABLE artifacts (
    -- Its id, chosen by whoever made it.
    artifact_id UUID PRIMARY KEY,
    -- Its place in lists: minted here, sorts by age.
    ordinal UUID NOT NULL UNIQUE,
    -- Whose it is.
    team TEXT NOT NULL,
    -- A name, for people.
    label TEXT NOT NULL,
    -- open: without final bytes. sealed: with them. deleting: garbage; the row stays as its tombstone.
    state TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'deleting')),
    -- Digest of its tree, once sealed.
    digest BYTEA CHECK (state <> 'sealed' OR digest IS NOT NULL),
    -- Bytes of its files, once sealed.
    size_bytes BIGINT NOT NULL,
    -- Whether anybody ever owned it: if so it goes with the last owner, else after a while.
    had_owner BOOLEAN NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When it was marked.
    marked_at BIGINT CHECK (state <> 'deleting' OR marked_at IS NOT NULL),
    -- Why it was marked, for people.
    marked_why TEXT
);
CREATE INDEX artifacts_by_team ON artifacts (team, ordinal);
CREATE INDEX artifacts_by_digest ON artifacts (team, digest) WHERE state = 'sealed';
CREATE INDEX artifacts_never_owned ON artifacts (created_at) WHERE had_owner = FALSE AND state <> 'deleting';
CREATE INDEX artifacts_deleting ON artifacts (marked_at) WHERE state = 'deleting';

-- Builds: owners that live until they ended and then as long as their caller asked.
CREATE TABLE builds (
    -- Its id, chosen by the caller.
    build_id UUID PRIMARY KEY,
    -- Whose it is.
    team TEXT NOT NULL,
    -- The workload whose settling ends it.
    ends_with UUID NOT NULL,
    -- How long it keeps its artifacts after its end, in microseconds.
    keep BIGINT NOT NULL,
    -- How long it lives after its caller last put it, in microseconds, unless that workload is bound to it.
    term BIGINT NOT NULL,
    -- When it ends by itself unless that workload was bound to it. At least a full term after a store started.
    term_ends_at BIGINT NOT NULL,
    -- Whether that workload was bound to it: from then on only its settling ends the build.
    bound BOOLEAN NOT NULL,
    -- succeeded, failed, errored, aborted. NULL: it goes on.
    status TEXT CHECK (status IN ('succeeded', 'failed', 'errored', 'aborted')),
    -- When it ended. NULL: it goes on.
    ended_at BIGINT,
    -- When it lets go of its artifacts. NULL: it goes on.
    kept_until BIGINT CHECK ((kept_until IS NULL) = (ended_at IS NULL)),
    -- When its row was made.
    created_at BIGINT NOT NULL
);
CREATE INDEX builds_by_workload ON builds (ends_with);
CREATE INDEX builds_going_on ON builds (term_ends_at) WHERE ended_at IS NULL;
CREATE INDEX builds_letting_go ON builds (kept_until) WHERE kept_until IS NOT NULL;
CREATE INDEX builds_ended ON builds (ended_at) WHERE ended_at IS NOT NULL;

-- Which builds own which artifacts. Whoever adds a row has locked both targets.
CREATE TABLE owners (
    -- What is owned.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- By whom.
    build_id UUID NOT NULL REFERENCES builds (build_id),
    PRIMARY KEY (artifact_id, build_id)
);
CREATE INDEX owners_by_build ON owners (build_id);

-- Workloads, as far as they pin artifacts or have attempts. Remembered for a while after they were settled.
CREATE TABLE holders (
    -- The workload.
    holder_id UUID PRIMARY KEY,
    -- Whose it is.
    team TEXT NOT NULL,
    -- When it was first heard of.
    created_at BIGINT NOT NULL,
    -- When it was settled. NULL: it goes on.
    settled_at BIGINT
);
CREATE INDEX holders_by_age ON holders (created_at);
CREATE INDEX holders_going_on ON holders (holder_id) WHERE settled_at IS NULL;

-- What workloads use, from the moment they are accepted until they are settled. Whoever adds a row has locked the artifact.
CREATE TABLE pins (
    -- Who uses it.
    holder_id UUID NOT NULL REFERENCES holders (holder_id),
    -- What is used.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- Since when.
    pinned_at BIGINT NOT NULL,
    PRIMARY KEY (holder_id, artifact_id)
);
CREATE INDEX pins_by_artifact ON pins (artifact_id);

-- Tries at workloads. What an attempt made is garbage once it has ended, except its settled outputs.
CREATE TABLE attempts (
    -- The attempt.
    attempt_id UUID PRIMARY KEY,
    -- Its workload.
    holder_id UUID NOT NULL,
    -- The worker that prepared it. NULL: none ever did.
    worker_id UUID,
    -- When it ended. NULL: it goes on.
    ended_at BIGINT
);
CREATE INDEX attempts_by_holder ON attempts (holder_id);
CREATE INDEX attempts_going_on ON attempts (holder_id) WHERE ended_at IS NULL;
CREATE INDEX attempts_ended ON attempts (ended_at) WHERE ended_at IS NOT NULL;

-- Directories on workers. A row is written before its directory is made, and goes after it is gone.
CREATE TABLE volumes (
    -- Its name on the worker, minted here and never twice. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Where it is.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- creating: it may not be there yet. created. unconfirmed: a new incarnation began and no report has named it yet.
    -- lost: a report did not name it. destroying: garbage. sweeping: garbage, and its worker's gateway was told.
    state TEXT NOT NULL CHECK (state IN ('creating', 'created', 'unconfirmed', 'lost', 'destroying', 'sweeping')),
    -- replica: holds an artifact's bytes, or shall. input: of an attempt. output: of an attempt, a replica once settled.
    -- scratch: room for an attempt, worth nothing after it.
    purpose TEXT NOT NULL CHECK (purpose IN ('replica', 'input', 'output', 'scratch')),
    -- Its name within its attempt.
    name TEXT,
    -- The artifact whose bytes it holds or may come to hold. An output's artifact is made when it is settled.
    artifact_id UUID,
    -- The artifact whose bytes it starts with. NULL: it starts empty.
    from_artifact_id UUID,
    -- The volume that it is a copy-on-write child of. Not a foreign key: after a loss parents may be forgotten first.
    parent UUID,
    -- The attempt that it was made for.
    attempt_id UUID,
    -- The transfer that makes it.
    transfer_id UUID,
    -- Until when that transfer may take, unless it says that it goes on. At least a full term after a store started.
    claimed_until BIGINT,
    -- Whether it has its final bytes.
    complete BOOLEAN NOT NULL,
    -- Digest of its tree, once complete.
    digest BYTEA CHECK (complete = FALSE OR digest IS NOT NULL),
    -- Bytes of its files, once complete.
    size_bytes BIGINT NOT NULL,
    -- Whether the digest was computed from the bytes on the worker.
    verified BOOLEAN NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- Only a report whose token is higher says anything about it: the worker's sequence when it was made or marked, or the
    -- token of a report that named it although its gateway had been told to destroy it.
    judged_after BIGINT NOT NULL,
    -- Why it was marked, for people.
    marked_why TEXT
);
CREATE INDEX volumes_by_worker ON volumes (worker_id, handle);
CREATE INDEX volumes_marked ON volumes (worker_id, state) WHERE state IN ('destroying', 'sweeping');
CREATE INDEX volumes_by_artifact ON volumes (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX volumes_by_source ON volumes (from_artifact_id) WHERE from_artifact_id IS NOT NULL;
CREATE INDEX volumes_by_parent ON volumes (parent) WHERE parent IS NOT NULL;
CREATE INDEX volumes_by_attempt ON volumes (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX volumes_of_attempts ON volumes (handle)
    WHERE purpose <> 'replica' AND state NOT IN ('destroying', 'sweeping');
CREATE INDEX volumes_claimed ON volumes (claimed_until) WHERE complete = FALSE AND claimed_until IS NOT NULL;
-- An attempt has one volume of each name, a transfer one volume, beside what is garbage.
CREATE UNIQUE INDEX volumes_one_of_name ON volumes (attempt_id, name)
    WHERE attempt_id IS NOT NULL AND state NOT IN ('destroying', 'sweeping');
CREATE UNIQUE INDEX volumes_one_of_transfer ON volumes (transfer_id)
    WHERE transfer_id IS NOT NULL AND state NOT IN ('destroying', 'sweeping');

-- Containers on workers. A row is written before its container is made, and goes after it is gone.
CREATE TABLE containers (
    -- Its name on the worker, minted here and never twice. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Where it is.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- As for volumes; containers are never unconfirmed, for their processes end with the incarnation.
    state TEXT NOT NULL CHECK (state IN ('creating', 'created', 'lost', 'destroying', 'sweeping')),
    -- The attempt that it was made for.
    attempt_id UUID NOT NULL,
    -- The workload of that attempt.
    holder_id UUID NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- As for volumes.
    judged_after BIGINT NOT NULL,
    -- Why it was marked, for people.
    marked_why TEXT
);
CREATE INDEX containers_by_worker ON containers (worker_id, handle);
CREATE INDEX containers_marked ON containers (worker_id, state) WHERE state IN ('destroying', 'sweeping');
CREATE INDEX containers_by_attempt ON containers (attempt_id);
CREATE INDEX containers_live ON containers (handle) WHERE state NOT IN ('destroying', 'sweeping');
-- An attempt has one container, beside what is garbage.
CREATE UNIQUE INDEX containers_one_of_attempt ON containers (attempt_id)
    WHERE state NOT IN ('destroying', 'sweeping');
