-- The artifact store's schema, for PostgreSQL and SQLite alike.
--
-- Instants are microseconds since 1970 (UTC). Sizes are bytes. Digests are 32 bytes (BLAKE3). Ids are UUIDs.
--
-- `look_at`: a row that may become garbage, or may be forgotten, says when the collector looks at it next. So a round reads what is due, however
-- much there is.
--
-- A row whose change touches no indexed column is changed in its place if its page has room (PostgreSQL: a heap-only tuple), and no index is
-- written. So no index of `artifacts` or `volumes` has a column, or a condition on one, that changes when a row is marked.

-- What this database is. One row.
CREATE TABLE store (
    -- Always 1.
    id BIGINT PRIMARY KEY CHECK (id = 1),
    -- The life of this database. A restored backup begins a new one, so that what it does not know is not swept.
    life UUID NOT NULL,
    -- The revision of the newest loss. Raised under this row's lock, so revisions become visible in their order.
    losses BIGINT NOT NULL DEFAULT 0,
    -- The revision of the newest loss that is forgotten.
    losses_forgotten BIGINT NOT NULL DEFAULT 0,
    -- The key of the receipts for reports that this store has judged: 32 bytes. A restored backup has the same. NULL: none was made yet.
    receipt_key BYTEA
);

-- The newest session that spoke for each worker. All that workers hold is fenced by these rows.
CREATE TABLE workers (
    -- The worker, as the scheduler names it.
    worker_id UUID PRIMARY KEY,
    -- The highest incarnation that has spoken.
    incarnation BIGINT NOT NULL,
    -- The highest session of that incarnation that has spoken. Lower ones are rejected.
    session BIGINT NOT NULL,
    -- Counts reports, incarnations, and what gateways are told to destroy. A report's token is the value at its beginning. Only rises.
    sequence BIGINT NOT NULL,
    -- The token of the newest report whose judging began; no older one judges any more. 0: none yet.
    reported BIGINT NOT NULL
);

-- Worker-independent names for bytes.
CREATE TABLE artifacts (
    -- Its id, chosen by the caller that made it.
    artifact_id UUID PRIMARY KEY,
    -- Its place in lists: minted here, sorts by age.
    ordinal UUID NOT NULL UNIQUE,
    -- The team that it belongs to.
    team TEXT NOT NULL,
    -- A name, for people.
    label TEXT NOT NULL,
    -- open: without final bytes. sealed: with them. deleting: garbage; the row stays as its tombstone.
    state TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'deleting')),
    -- Digest of its tree, once sealed.
    digest BYTEA CHECK (state <> 'sealed' OR digest IS NOT NULL),
    -- Bytes of its files, once sealed.
    size_bytes BIGINT NOT NULL,
    -- Whether it ever had an owner: if so it goes with the last one, else after a while.
    had_owner BOOLEAN NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When it was marked.
    marked_at BIGINT CHECK (state <> 'deleting' OR marked_at IS NOT NULL),
    -- Why it was marked, for people.
    marked_why TEXT,
    -- Until then it is kept without an owner. NULL: it needs an owner, once it had one.
    kept_until BIGINT,
    -- When to look at it. NULL: an owner lives, and says when it lets go; or it is deleted, and `tombstones` says when.
    look_at BIGINT,
    -- Whether the tree that it was made from is in `trees`, so that it has its bytes without a replica.
    in_store BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX artifacts_by_team ON artifacts (team, ordinal);
CREATE INDEX artifacts_by_digest ON artifacts (team, digest) WHERE digest IS NOT NULL;
CREATE INDEX artifacts_to_look_at ON artifacts (look_at) WHERE look_at IS NOT NULL;
-- Room for what changes in its place: a mark adds its instant and its reason to the row, and ten neighbours may be marked at once.
-- postgres: ALTER TABLE artifacts SET (fillfactor = 65);

-- Deleted artifacts, which can come back. A transaction that adds or removes a row has locked the artifact.
CREATE TABLE tombstones (
    -- The artifact.
    artifact_id UUID PRIMARY KEY,
    -- When to look whether its replicas, or it, can go.
    look_at BIGINT NOT NULL
);
CREATE INDEX tombstones_to_look_at ON tombstones (look_at);

-- Small trees, from which artifacts were made without a worker. Apart from their artifacts, of which many are read without their bytes.
CREATE TABLE trees (
    -- The artifact that has these bytes. The row goes with its row, when the tombstone is over.
    artifact_id UUID PRIMARY KEY REFERENCES artifacts (artifact_id),
    -- `gantry.artifacts.v1.SmallTree`, encoded, as its caller handed it over.
    tree BYTEA NOT NULL
);

-- Jobs, as far as builds were reported for them.
CREATE TABLE jobs (
    -- The team that it belongs to.
    team TEXT NOT NULL,
    -- Its name, chosen by the caller.
    job TEXT NOT NULL,
    -- The highest number that was ever reported: the latest build.
    latest_number BIGINT NOT NULL,
    -- The build with that number.
    latest_build UUID NOT NULL,
    PRIMARY KEY (team, job)
);
CREATE INDEX jobs_by_build ON jobs (latest_build);

-- Builds: owners that live until they have ended and let go.
CREATE TABLE builds (
    -- Its id, chosen by the caller.
    build_id UUID PRIMARY KEY,
    -- The team that it belongs to.
    team TEXT NOT NULL,
    -- The job that it is a build of. NULL: none.
    job TEXT,
    -- Its number in that job: a higher one is later. NULL without a job.
    number BIGINT CHECK ((number IS NULL) = (job IS NULL)),
    -- The workload whose settling ends it. NULL: its caller says when it has ended.
    ends_with UUID,
    -- How long it keeps its artifacts after its end at least, in microseconds.
    keep BIGINT NOT NULL,
    -- How long it lives after its caller last put it, in microseconds, unless that workload is bound to it. NULL: without limit.
    term BIGINT,
    -- When it ends by its term unless that workload was bound to it. At least a full term after a store started.
    term_ends_at BIGINT CHECK ((term_ends_at IS NULL) = (term IS NULL)),
    -- Whether that workload was bound to it: from then on it does not end by its term.
    bound BOOLEAN NOT NULL,
    -- succeeded, failed, errored, aborted. NULL: it goes on.
    status TEXT CHECK (status IN ('succeeded', 'failed', 'errored', 'aborted')),
    -- When it ended. NULL: it goes on.
    ended_at BIGINT CHECK ((ended_at IS NULL) = (status IS NULL)),
    -- When it lets go of its artifacts. NULL: it goes on, or it is the latest of its job and did not succeed.
    kept_until BIGINT CHECK (kept_until IS NULL OR ended_at IS NOT NULL),
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When to look at it. NULL: the transaction that changes it says so.
    look_at BIGINT
);
CREATE INDEX builds_by_workload ON builds (ends_with) WHERE ends_with IS NOT NULL;
CREATE INDEX builds_to_look_at ON builds (look_at) WHERE look_at IS NOT NULL;
CREATE UNIQUE INDEX builds_one_of_number ON builds (team, job, number) WHERE job IS NOT NULL;

-- Which builds own which artifacts. A transaction that adds a row has locked both targets.
CREATE TABLE owners (
    -- What is owned.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- The owner. A build that lets go loses its rows.
    build_id UUID NOT NULL REFERENCES builds (build_id),
    PRIMARY KEY (artifact_id, build_id)
);
CREATE INDEX owners_by_build ON owners (build_id);

-- What was fetched for a resource, to be fetched once. What a cache owns stands in its own row, in `artifact_id`. A transaction that puts it there
-- has locked the artifact.
CREATE TABLE resource_caches (
    -- Its id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- The team to which it is answered. Empty: every team, on purpose.
    scope TEXT NOT NULL,
    -- What makes it this cache and no other.
    key_digest BYTEA NOT NULL,
    -- The type of the resource, its version and its parameters, for people.
    resource_type TEXT NOT NULL,
    version TEXT NOT NULL,
    params TEXT NOT NULL,
    -- The team that made it, or makes it.
    team TEXT NOT NULL,
    -- The claim under which that is done, chosen by the maker.
    claim_id UUID NOT NULL UNIQUE,
    -- Until when the maker may take, unless it renews the claim. NULL: it was made. At least a full term after a store started.
    claimed_until BIGINT CHECK ((claimed_until IS NULL) = (artifact_id IS NOT NULL)),
    -- What it owns. NULL: it is being made.
    artifact_id UUID REFERENCES artifacts (artifact_id),
    -- When it was last answered, put, used or released, as far as that was noticed: the end of a use is noticed at a look.
    last_used BIGINT NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When to look whether it goes.
    look_at BIGINT NOT NULL,
    UNIQUE (scope, key_digest)
);
CREATE INDEX resource_caches_by_artifact ON resource_caches (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX resource_caches_to_look_at ON resource_caches (look_at);

-- Which builds and workloads use which resource cache. A use counts until its build has let go or its workload was settled, whether its row is there
-- or not: the row goes at a look.
CREATE TABLE cache_uses (
    -- What is used.
    cache_id UUID NOT NULL REFERENCES resource_caches (cache_id),
    -- build, workload.
    user_kind TEXT NOT NULL CHECK (user_kind IN ('build', 'workload')),
    -- The build or the workload. One that is not in its table has ended.
    user_id UUID NOT NULL,
    PRIMARY KEY (cache_id, user_kind, user_id)
);
CREATE INDEX cache_uses_by_user ON cache_uses (user_id);

-- What a step of a job leaves in a path for the next time. What it owns stands in its own row, as of resource caches.
CREATE TABLE task_caches (
    -- Its id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- The team that it belongs to.
    team TEXT NOT NULL,
    -- The job, the step and the path, as the caller names them.
    job TEXT NOT NULL,
    step TEXT NOT NULL,
    path TEXT NOT NULL,
    -- What was published last. NULL: nothing yet.
    artifact_id UUID REFERENCES artifacts (artifact_id),
    -- It goes when it was unused for as long, in microseconds.
    ttl BIGINT NOT NULL,
    -- When it was last asked for or published.
    last_used BIGINT NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When to look whether it goes.
    look_at BIGINT NOT NULL,
    UNIQUE (team, job, step, path)
);
CREATE INDEX task_caches_by_artifact ON task_caches (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX task_caches_to_look_at ON task_caches (look_at);

-- Which workloads find which task caches as directories. Such a cache is kept. A use ends when its workload is settled, whose row goes later than
-- this one.
CREATE TABLE task_cache_uses (
    -- What is used.
    cache_id UUID NOT NULL REFERENCES task_caches (cache_id),
    -- The workload.
    holder_id UUID NOT NULL,
    PRIMARY KEY (cache_id, holder_id)
);
CREATE INDEX task_cache_uses_by_holder ON task_cache_uses (holder_id);

-- Images of the types of resources that come with the system. For every team.
CREATE TABLE base_resource_types (
    -- Its id, minted here. The versions that follow one another have the same. Sorts by age.
    base_type_id UUID PRIMARY KEY,
    -- The type.
    resource_type TEXT NOT NULL,
    -- Its version, for people.
    version TEXT NOT NULL,
    -- The worker that has it. NULL: it is cluster-wide, for all workers.
    worker_id UUID,
    -- What it is.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX base_resource_types_by_artifact ON base_resource_types (artifact_id);
CREATE UNIQUE INDEX base_resource_types_of_worker ON base_resource_types (resource_type, worker_id) WHERE worker_id IS NOT NULL;
CREATE UNIQUE INDEX base_resource_types_cluster_wide ON base_resource_types (resource_type) WHERE worker_id IS NULL;

-- The certs that a worker gives to resources. For every team.
CREATE TABLE resource_certs (
    -- The worker.
    worker_id UUID PRIMARY KEY,
    -- What they are.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX resource_certs_by_artifact ON resource_certs (artifact_id);

-- Images and certs that workers provide, as their gateways said last, and the artifact that was made of each, or is. Once it is made it has an
-- owner: the base resource type or the certs of the worker, which have the same artifact then.
CREATE TABLE imports (
    -- The worker that provides it.
    worker_id UUID NOT NULL,
    -- The resource type whose image it is. Empty: the certs of the worker.
    resource_type TEXT NOT NULL,
    -- Its id, minted here. The versions that follow one another have the same. Sorts by age.
    import_id UUID NOT NULL UNIQUE,
    -- The version, and where on the worker it is: with others it is imported again.
    version TEXT NOT NULL,
    path TEXT NOT NULL,
    -- What it becomes, and the volume that was made for it. If they are gone, new ones are minted.
    artifact_id UUID NOT NULL,
    volume UUID NOT NULL,
    -- When and why the last try failed. NULL: none did since version and path are these, or since it was imported.
    failed_at BIGINT,
    failed_why TEXT CHECK ((failed_why IS NULL) = (failed_at IS NULL)),
    PRIMARY KEY (worker_id, resource_type)
);

-- Workloads, as far as they pin artifacts or have attempts. Remembered for a while after they were settled.
CREATE TABLE holders (
    -- The workload.
    holder_id UUID PRIMARY KEY,
    -- The team that it belongs to.
    team TEXT NOT NULL,
    -- When a call first named it.
    created_at BIGINT NOT NULL,
    -- When it was settled. NULL: it goes on.
    settled_at BIGINT,
    -- When to look whether it can be forgotten.
    look_at BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX holders_going_on ON holders (holder_id) WHERE settled_at IS NULL;
CREATE INDEX holders_to_look_at ON holders (look_at);

-- What workloads use, from the moment they are accepted until they are settled. A transaction that adds a row has locked the artifact.
CREATE TABLE pins (
    -- The workload that uses it.
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
    ended_at BIGINT,
    -- When to look at it. NULL: it goes on, and its end says so.
    look_at BIGINT
);
CREATE INDEX attempts_by_holder ON attempts (holder_id);
CREATE INDEX attempts_going_on ON attempts (holder_id) WHERE ended_at IS NULL;
CREATE INDEX attempts_to_look_at ON attempts (look_at) WHERE look_at IS NOT NULL;

-- Directories on workers. A row is written before its directory is made, and goes after it is gone.
CREATE TABLE volumes (
    -- Its name on the worker, minted here and never twice. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Where it is.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- creating: it may not be there yet. created. unconfirmed: a new incarnation began and no report has named it yet.
    -- lost: a report did not name it. destroying: garbage. sweeping: garbage, and its worker's gateway was told.
    state TEXT NOT NULL CHECK (state IN ('creating', 'created', 'unconfirmed', 'lost', 'destroying', 'sweeping')),
    -- replica: holds an artifact's bytes, or is to. input: of an attempt. output: of an attempt, a replica once settled.
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
    -- Whether the transfer copies a sealed artifact. An open one is filled, by any number of transfers.
    is_copy BOOLEAN NOT NULL DEFAULT FALSE,
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
    -- token of a report that named it although its gateway had been told to destroy it. Of one that is sweeping it is the number that was minted
    -- when its gateway was told, the last time.
    judged_after BIGINT NOT NULL,
    -- Why it was marked, for people.
    marked_why TEXT,
    -- When it was marked. NULL: it was not.
    marked_at BIGINT,
    -- The state that it was marked in: a replica comes back to it with its artifact. `unconfirmed` instead of `created` once a new incarnation
    -- of its worker began. NULL: it was not marked.
    marked_from TEXT,
    -- Since when reports do not name it. NULL: it is not lost.
    lost_at BIGINT,
    -- Whether the loss is in `losses`.
    loss_noticed BOOLEAN NOT NULL DEFAULT FALSE,
    -- When it was adopted after it had been an orphan. NULL: it was not.
    adopted_at BIGINT,
    -- Whether it is garbage in whose place another may be made: of its name in its attempt, by its transfer, or as the copy of its artifact. Garbage
    -- whose attempt or transfer has ended blocks nothing, and need not say so.
    given_up BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX volumes_by_worker ON volumes (worker_id, handle);
CREATE INDEX volumes_by_artifact ON volumes (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX volumes_by_source ON volumes (from_artifact_id) WHERE from_artifact_id IS NOT NULL;
CREATE INDEX volumes_by_parent ON volumes (parent) WHERE parent IS NOT NULL;
CREATE INDEX volumes_by_attempt ON volumes (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX volumes_claimed ON volumes (claimed_until) WHERE complete = FALSE AND claimed_until IS NOT NULL AND given_up = FALSE;
CREATE INDEX volumes_newly_lost ON volumes (lost_at) WHERE lost_at IS NOT NULL AND loss_noticed = FALSE;
-- Whether a transfer fills an artifact is found without a look at its replicas.
CREATE INDEX volumes_unfinished ON volumes (artifact_id) WHERE complete = FALSE AND artifact_id IS NOT NULL;
-- Beside what is garbage, an attempt has one volume of each name, a transfer one volume, and an artifact one unfinished copy on each worker.
CREATE UNIQUE INDEX volumes_one_of_name ON volumes (attempt_id, name) WHERE attempt_id IS NOT NULL AND given_up = FALSE;
CREATE UNIQUE INDEX volumes_one_of_transfer ON volumes (transfer_id) WHERE transfer_id IS NOT NULL AND given_up = FALSE;
CREATE UNIQUE INDEX volumes_one_copy ON volumes (artifact_id, worker_id) WHERE is_copy = TRUE AND complete = FALSE AND given_up = FALSE;
-- As for artifacts.
-- postgres: ALTER TABLE volumes SET (fillfactor = 60);

-- Volumes that are garbage, by their workers. A row comes with the mark, and goes with it, or with the volume.
CREATE TABLE sweep_queue (
    -- Where the volume is.
    worker_id UUID NOT NULL,
    -- The volume.
    handle UUID NOT NULL,
    -- The volume's `judged_after`, once its gateway was told: a stream reads on where it was. NULL: it was not told.
    number BIGINT,
    -- When the volume was marked, if it is a complete replica whose artifact is deleted: its own row does not say so until its gateway was told, so
    -- that the page in which it lies is not written. NULL: its own row says when it was marked.
    marked_at BIGINT,
    PRIMARY KEY (worker_id, handle)
);
CREATE INDEX sweep_queue_told ON sweep_queue (worker_id, number, handle) WHERE number IS NOT NULL;

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
    marked_why TEXT,
    -- As for volumes.
    marked_at BIGINT,
    -- When it was last used interactively. NULL: never.
    touched_at BIGINT,
    -- Since when reports do not name it. NULL: it is not lost.
    lost_at BIGINT,
    -- Whether the loss is in `losses`.
    loss_noticed BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX containers_by_worker ON containers (worker_id, handle);
CREATE INDEX containers_marked ON containers (worker_id, state) WHERE state IN ('destroying', 'sweeping');
CREATE INDEX containers_sweeping ON containers (worker_id, judged_after, handle) WHERE state = 'sweeping';
CREATE INDEX containers_by_attempt ON containers (attempt_id);
CREATE INDEX containers_newly_lost ON containers (lost_at) WHERE state = 'lost' AND loss_noticed = FALSE;
-- An attempt has one container, beside what is garbage.
CREATE UNIQUE INDEX containers_one_of_attempt ON containers (attempt_id)
    WHERE state NOT IN ('destroying', 'sweeping');

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

-- Orphans: volumes and containers that workers hold and that have no row, because this store came out of a backup. An operator decides about them. A
-- row goes when it is adopted or purged, or when a report does not name it any more.
CREATE TABLE orphans (
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
    -- The team that it belongs to. NULL: not known.
    team TEXT,
    -- The artifact whose bytes it held, or was to become. NULL: not known.
    artifact_id UUID,
    -- Digest of its tree. NULL: it has no final bytes, or that is not known.
    digest BYTEA,
    -- Bytes of its files, if the digest is known.
    size_bytes BIGINT NOT NULL
);
CREATE INDEX orphans_by_worker ON orphans (worker_id, handle);
CREATE INDEX orphans_by_parent ON orphans (parent) WHERE parent IS NOT NULL;
CREATE INDEX orphans_by_artifact ON orphans (artifact_id) WHERE artifact_id IS NOT NULL;

-- Volumes, containers and caches that are gone, and why.
CREATE TABLE deletion_log (
    -- The handle or id that it had.
    id UUID PRIMARY KEY,
    -- What it was.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container', 'resource_cache', 'task_cache')),
    -- The team that may ask. NULL: every team.
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
CREATE INDEX deletion_log_to_look_at ON deletion_log (look_at);
