-- Schema of the artifact store, for PostgreSQL and SQLite.
--
-- Instants are microseconds since 1970 (UTC). Sizes are bytes. Digests are 32 bytes (BLAKE3). Ids
-- are UUIDs.
--
-- `due_at`: when the collector next checks a row that may become garbage or may be forgotten. A
-- collection reads only rows that are due, however many rows there are.
--
-- An update of unindexed columns changes a row in place if its page has room (PostgreSQL: a
-- heap-only tuple), and writes no index. Therefore no index of `artifacts` or `volumes` contains a
-- column that a mark changes, or has a condition on such a column.

-- Identity and counters of this database. One row.
CREATE TABLE store (
    -- Always 1.
    id BIGINT PRIMARY KEY CHECK (id = 1),
    -- The store life. A restored backup begins a new one, so that volumes unknown to it are not
    -- swept.
    life UUID NOT NULL,
    -- Revision of the newest loss. Raised under this row's lock, so that revisions become visible
    -- in order.
    losses BIGINT NOT NULL DEFAULT 0,
    -- Revision of the newest forgotten loss.
    losses_forgotten BIGINT NOT NULL DEFAULT 0,
    -- Key of the receipts for judged reports: 32 bytes. A restored backup has the same key. NULL:
    -- none was created yet.
    receipt_key BYTEA
);

-- The newest session of each worker. Its row fences all changes to the contents of the worker.
CREATE TABLE workers (
    -- Id of the worker, from the scheduler.
    worker_id UUID PRIMARY KEY,
    -- Highest recorded incarnation.
    incarnation BIGINT NOT NULL,
    -- Highest recorded session of that incarnation. Lower ones are rejected.
    session BIGINT NOT NULL,
    -- Counter of reports, incarnations, and deletions handed to gateways. The token of a report is
    -- the value at its beginning. Only rises.
    sequence BIGINT NOT NULL,
    -- Token of the newest report whose judging began. Older reports no longer judge. 0: none yet.
    reported BIGINT NOT NULL
);

-- Artifacts: file trees with an id that does not depend on a worker.
CREATE TABLE artifacts (
    -- Id, chosen by the caller that created it.
    artifact_id UUID PRIMARY KEY,
    -- Position in lists. Minted here, sorts by age.
    ordinal UUID NOT NULL UNIQUE,
    -- Team of the artifact.
    team TEXT NOT NULL,
    -- Name for people.
    label TEXT NOT NULL,
    -- open: without final bytes. sealed: with final bytes. deleting: garbage. The row stays as a
    -- tombstone.
    state TEXT NOT NULL CHECK (state IN ('open', 'sealed', 'deleting')),
    -- Digest of its tree, if sealed.
    digest BYTEA CHECK (state <> 'sealed' OR digest IS NOT NULL),
    -- Bytes of its files, if sealed.
    size_bytes BIGINT NOT NULL,
    -- Whether it ever had an owner. If so, it is deleted after its last owner lets go. Otherwise it
    -- is deleted after a fixed time.
    had_owner BOOLEAN NOT NULL,
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- When it was marked.
    marked_at BIGINT CHECK (state <> 'deleting' OR marked_at IS NOT NULL),
    -- Reason of the mark, for people.
    mark_reason TEXT,
    -- Until when it is kept without an owner. NULL: it needs an owner once it had one.
    kept_until BIGINT,
    -- When to check it next. NULL: an owner keeps it and will schedule the check, or it is deleted
    -- and `tombstones` has the time.
    due_at BIGINT,
    -- Whether its tree is in `trees`, so that its bytes exist without a replica.
    in_store BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX artifacts_by_team ON artifacts (team, ordinal);
CREATE INDEX artifacts_by_digest ON artifacts (team, digest) WHERE digest IS NOT NULL;
CREATE INDEX artifacts_due ON artifacts (due_at) WHERE due_at IS NOT NULL;
-- Free space for updates in place. A mark adds an instant and a reason to the row, and ten
-- neighbours may be marked at once.
-- postgres: ALTER TABLE artifacts SET (fillfactor = 65);

-- Deleted artifacts that can be restored. A transaction that adds or removes a row has locked the
-- artifact.
CREATE TABLE tombstones (
    -- The artifact.
    artifact_id UUID PRIMARY KEY,
    -- When to check whether its replicas or the tombstone can be removed.
    due_at BIGINT NOT NULL
);
CREATE INDEX tombstones_due ON tombstones (due_at);

-- Bytes of small trees, from which artifacts were created without a worker. A separate table,
-- because artifacts are often read without their bytes.
CREATE TABLE trees (
    -- The artifact with these bytes. The row is deleted with the artifact's row when the tombstone
    -- expires.
    artifact_id UUID PRIMARY KEY REFERENCES artifacts (artifact_id),
    -- `gantry.artifacts.v1.SmallTree`, encoded, as received from the caller.
    tree BYTEA NOT NULL
);

-- Jobs, as far as builds were reported for them.
CREATE TABLE jobs (
    -- Team of the job.
    team TEXT NOT NULL,
    -- Name, chosen by the caller.
    job TEXT NOT NULL,
    -- Highest build number that was ever reported.
    latest_number BIGINT NOT NULL,
    -- Build with that number, the latest build.
    latest_build UUID NOT NULL,
    PRIMARY KEY (team, job)
);
CREATE INDEX jobs_by_build ON jobs (latest_build);

-- Builds: owners that keep artifacts until some time after their end.
CREATE TABLE builds (
    -- Id, chosen by the caller.
    build_id UUID PRIMARY KEY,
    -- Team of the build.
    team TEXT NOT NULL,
    -- Job of the build. NULL: none.
    job TEXT,
    -- Number in that job. A higher number is later. NULL without a job.
    number BIGINT CHECK ((number IS NULL) = (job IS NULL)),
    -- Workload that ends the build when it is settled. NULL: the caller ends the build.
    ends_with UUID,
    -- Minimum time for which it keeps its artifacts after its end, in microseconds.
    keep BIGINT NOT NULL,
    -- Time after its last PutBuild after which it ends unless that workload is bound to it, in
    -- microseconds. NULL: no limit.
    term BIGINT,
    -- When it ends by its term unless that workload is bound to it. At least a full term after a
    -- store started.
    term_ends_at BIGINT CHECK ((term_ends_at IS NULL) = (term IS NULL)),
    -- Whether that workload is bound to it. A bound build does not end by its term.
    bound BOOLEAN NOT NULL,
    -- succeeded, failed, errored, aborted. NULL: open.
    status TEXT CHECK (status IN ('succeeded', 'failed', 'errored', 'aborted')),
    -- When it ended. NULL: open.
    ended_at BIGINT CHECK ((ended_at IS NULL) = (status IS NULL)),
    -- When it lets go of its artifacts. NULL: it is open, or it is the latest build of its job and
    -- did not succeed.
    kept_until BIGINT CHECK (kept_until IS NULL OR ended_at IS NOT NULL),
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- When to check it next. NULL: the transaction that changes it schedules the check.
    due_at BIGINT
);
CREATE INDEX builds_by_workload ON builds (ends_with) WHERE ends_with IS NOT NULL;
CREATE INDEX builds_due ON builds (due_at) WHERE due_at IS NOT NULL;
CREATE UNIQUE INDEX builds_one_of_number ON builds (team, job, number) WHERE job IS NOT NULL;

-- Artifacts owned by builds. A transaction that adds a row has locked both targets.
CREATE TABLE owners (
    -- The owned artifact.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- The owning build. When a build lets go, its rows are deleted.
    build_id UUID NOT NULL REFERENCES builds (build_id),
    PRIMARY KEY (artifact_id, build_id)
);
CREATE INDEX owners_by_build ON owners (build_id);

-- Resource caches. `artifact_id` is the artifact that a cache owns. A transaction that sets it has
-- locked the artifact.
CREATE TABLE resource_caches (
    -- Id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- Team to which the cache is available. Empty: every team.
    scope TEXT NOT NULL,
    -- Digest of the cache's key.
    key_digest BYTEA NOT NULL,
    -- Type, version and parameters of the resource, for people.
    resource_type TEXT NOT NULL,
    version TEXT NOT NULL,
    params TEXT NOT NULL,
    -- Team that created the cache, or is creating it.
    team TEXT NOT NULL,
    -- Claim under which the cache is created, chosen by its maker.
    claim_id UUID NOT NULL UNIQUE,
    -- When the claim expires unless its maker renews it. NULL: the cache is ready. At least a full
    -- term after a store started.
    claimed_until BIGINT CHECK ((claimed_until IS NULL) = (artifact_id IS NOT NULL)),
    -- Artifact that the cache owns. NULL: it is being created.
    artifact_id UUID REFERENCES artifacts (artifact_id),
    -- When it was last returned, put, used or released, as far as known. The end of a use is
    -- noticed at the next check.
    last_used BIGINT NOT NULL,
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- When to check whether it can be deleted.
    due_at BIGINT NOT NULL,
    UNIQUE (scope, key_digest)
);
CREATE INDEX resource_caches_by_artifact ON resource_caches (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX resource_caches_due ON resource_caches (due_at);

-- Uses of resource caches by builds and workloads. A use counts until its build lets go or its
-- workload is settled, whether or not the row exists. The row is deleted at a later check.
CREATE TABLE cache_uses (
    -- The used cache.
    cache_id UUID NOT NULL REFERENCES resource_caches (cache_id),
    -- build, workload.
    user_kind TEXT NOT NULL CHECK (user_kind IN ('build', 'workload')),
    -- The build or workload. It has ended if it has no row.
    user_id UUID NOT NULL,
    PRIMARY KEY (cache_id, user_kind, user_id)
);
CREATE INDEX cache_uses_by_user ON cache_uses (user_id);

-- Task caches: directories that a step of a job keeps between runs. `artifact_id` as in
-- `resource_caches`.
CREATE TABLE task_caches (
    -- Id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- Team of the cache.
    team TEXT NOT NULL,
    -- Job, step and path, as named by the caller.
    job TEXT NOT NULL,
    step TEXT NOT NULL,
    path TEXT NOT NULL,
    -- Latest published version. NULL: none yet.
    artifact_id UUID REFERENCES artifacts (artifact_id),
    -- Time without use after which it is deleted, in microseconds.
    ttl BIGINT NOT NULL,
    -- When it was last requested or published.
    last_used BIGINT NOT NULL,
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- When to check whether it can be deleted.
    due_at BIGINT NOT NULL,
    UNIQUE (team, job, step, path)
);
CREATE INDEX task_caches_by_artifact ON task_caches (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX task_caches_due ON task_caches (due_at);

-- Task caches that workloads mount as directories. A used cache is kept. A use ends when its
-- workload is settled. The workload's row is deleted after this one.
CREATE TABLE task_cache_uses (
    -- The used cache.
    cache_id UUID NOT NULL REFERENCES task_caches (cache_id),
    -- The workload.
    holder_id UUID NOT NULL,
    PRIMARY KEY (cache_id, holder_id)
);
CREATE INDEX task_cache_uses_by_holder ON task_cache_uses (holder_id);

-- Base resource types: images of resource types. Available to every team.
CREATE TABLE base_resource_types (
    -- Id, minted here. Successive versions have the same id. Sorts by age.
    base_type_id UUID PRIMARY KEY,
    -- Name of the type.
    resource_type TEXT NOT NULL,
    -- Version, for people.
    version TEXT NOT NULL,
    -- Worker that has the image. NULL: cluster-wide, for all workers.
    worker_id UUID,
    -- Artifact of the image.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX base_resource_types_by_artifact ON base_resource_types (artifact_id);
CREATE UNIQUE INDEX base_resource_types_of_worker ON base_resource_types (resource_type, worker_id) WHERE worker_id IS NOT NULL;
CREATE UNIQUE INDEX base_resource_types_cluster_wide ON base_resource_types (resource_type) WHERE worker_id IS NULL;

-- Certificates that a worker gives to resources. Available to every team.
CREATE TABLE resource_certs (
    -- The worker.
    worker_id UUID PRIMARY KEY,
    -- Artifact of the certificates.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX resource_certs_by_artifact ON resource_certs (artifact_id);

-- Images and certificates that workers provide, from the last message of their gateways, and the
-- artifact that each becomes. After the import, the base resource type or the certificates of the
-- worker own that artifact.
CREATE TABLE imports (
    -- Worker that provides it.
    worker_id UUID NOT NULL,
    -- Resource type of the image. Empty: the certificates of the worker.
    resource_type TEXT NOT NULL,
    -- Id, minted here. Successive versions have the same id. Sorts by age.
    import_id UUID NOT NULL UNIQUE,
    -- Version, and path on the worker. A change of either causes a new import.
    version TEXT NOT NULL,
    path TEXT NOT NULL,
    -- Artifact and volume of the import. If they are gone, new ones are minted.
    artifact_id UUID NOT NULL,
    volume UUID NOT NULL,
    -- Time and reason of the last failure. NULL: no failure since version and path were set, or
    -- since the import succeeded.
    failed_at BIGINT,
    failure_reason TEXT CHECK ((failure_reason IS NULL) = (failed_at IS NULL)),
    PRIMARY KEY (worker_id, resource_type)
);

-- Workloads that pin artifacts or have attempts. Remembered for a while after they are settled.
CREATE TABLE holders (
    -- The workload.
    holder_id UUID PRIMARY KEY,
    -- Team of the workload.
    team TEXT NOT NULL,
    -- When a call first named it.
    created_at BIGINT NOT NULL,
    -- When it was settled. NULL: not settled.
    settled_at BIGINT,
    -- Digest of the call that settled it, which distinguishes a repeat from another call. NULL: not
    -- settled, or settled without outputs.
    settlement BYTEA,
    -- When to check whether it can be forgotten.
    due_at BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX holders_going_on ON holders (holder_id) WHERE settled_at IS NULL;
CREATE INDEX holders_due ON holders (due_at);

-- Pins of workloads on artifacts, from acceptance until the workload is settled. A transaction that
-- adds a row has locked the artifact.
CREATE TABLE pins (
    -- Workload that uses the artifact.
    holder_id UUID NOT NULL REFERENCES holders (holder_id),
    -- The pinned artifact.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- When it was pinned.
    pinned_at BIGINT NOT NULL,
    PRIMARY KEY (holder_id, artifact_id)
);
CREATE INDEX pins_by_artifact ON pins (artifact_id);

-- Attempts at workloads. Containers and volumes of an ended attempt are garbage, except its settled
-- outputs.
CREATE TABLE attempts (
    -- The attempt.
    attempt_id UUID PRIMARY KEY,
    -- Its workload.
    holder_id UUID NOT NULL,
    -- Worker that prepared it. NULL: none.
    worker_id UUID,
    -- When it ended. NULL: not ended.
    ended_at BIGINT,
    -- When to check it next. NULL: its end schedules the check.
    due_at BIGINT
);
CREATE INDEX attempts_by_holder ON attempts (holder_id);
CREATE INDEX attempts_going_on ON attempts (holder_id) WHERE ended_at IS NULL;
CREATE INDEX attempts_due ON attempts (due_at) WHERE due_at IS NOT NULL;

-- Directories on workers. A row is written before its directory is created, and deleted after the
-- directory is gone.
CREATE TABLE volumes (
    -- Name on the worker. Minted here, never reused. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Worker that holds it.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- - creating: may not exist yet.
    -- - created: exists.
    -- - unconfirmed: a new incarnation began, and no report has named it yet.
    -- - lost: missing from a report.
    -- - destroying: garbage.
    -- - sweeping: garbage, and handed out to the worker's gateway.
    state TEXT NOT NULL CHECK (state IN ('creating', 'created', 'unconfirmed', 'lost', 'destroying', 'sweeping')),
    -- - replica: holds or will hold an artifact's bytes.
    -- - input: input of an attempt.
    -- - output: output of an attempt, a replica once settled.
    -- - scratch: temporary space of an attempt, garbage after its end.
    purpose TEXT NOT NULL CHECK (purpose IN ('replica', 'input', 'output', 'scratch')),
    -- Name within its attempt.
    name TEXT,
    -- Artifact whose bytes it holds or may come to hold. The artifact of an output is created when
    -- the workload is settled.
    artifact_id UUID,
    -- Artifact whose bytes it starts with. NULL: it starts empty.
    from_artifact_id UUID,
    -- Volume of which it is a copy-on-write child. Not a foreign key: after a loss, parents may be
    -- forgotten first.
    parent UUID,
    -- Attempt that it was created for.
    attempt_id UUID,
    -- Transfer that creates it.
    transfer_id UUID,
    -- When the claim of that transfer expires unless it is renewed. At least a full term after a
    -- store started.
    claimed_until BIGINT,
    -- Whether the transfer copies a sealed artifact. Any number of transfers may fill an open
    -- artifact.
    is_copy BOOLEAN NOT NULL DEFAULT FALSE,
    -- Whether it has its final bytes.
    complete BOOLEAN NOT NULL,
    -- Digest of its tree, if complete.
    digest BYTEA CHECK (complete = FALSE OR digest IS NOT NULL),
    -- Bytes of its files, if complete.
    size_bytes BIGINT NOT NULL,
    -- Whether the digest was computed from the bytes on the worker.
    verified BOOLEAN NOT NULL,
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- Only a report with a higher token judges the volume. The value is the worker's sequence when
    -- the row was created or marked, or the token of a report that named the volume after it was
    -- handed out. For a sweeping volume, it is the number that was minted when it was last handed
    -- out.
    judged_after BIGINT NOT NULL,
    -- Reason of the mark, for people.
    mark_reason TEXT,
    -- When it was marked. NULL: not marked.
    marked_at BIGINT,
    -- State before the mark. A replica returns to it when its artifact is restored. `unconfirmed`
    -- instead of `created` after a new incarnation of its worker began. NULL: not marked.
    marked_from TEXT,
    -- Since when reports do not name it. NULL: not lost.
    lost_at BIGINT,
    -- Whether the loss is in `losses`.
    loss_noticed BOOLEAN NOT NULL DEFAULT FALSE,
    -- When it was adopted as a former orphan. NULL: it was not an orphan.
    adopted_at BIGINT,
    -- Whether it is garbage that another volume may replace: as the volume of this name in its
    -- attempt, of its transfer, or as the copy of its artifact. May be FALSE for garbage of an
    -- ended attempt or transfer, which blocks nothing.
    given_up BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX volumes_by_worker ON volumes (worker_id, handle);
CREATE INDEX volumes_by_artifact ON volumes (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX volumes_by_source ON volumes (from_artifact_id) WHERE from_artifact_id IS NOT NULL;
CREATE INDEX volumes_by_parent ON volumes (parent) WHERE parent IS NOT NULL;
CREATE INDEX volumes_by_attempt ON volumes (attempt_id) WHERE attempt_id IS NOT NULL;
CREATE INDEX volumes_claimed ON volumes (claimed_until) WHERE complete = FALSE AND claimed_until IS NOT NULL AND given_up = FALSE;
CREATE INDEX volumes_newly_lost ON volumes (lost_at) WHERE lost_at IS NOT NULL AND loss_noticed = FALSE;
-- Finds a transfer that fills an artifact without reading the replicas.
CREATE INDEX volumes_unfinished ON volumes (artifact_id) WHERE complete = FALSE AND artifact_id IS NOT NULL;
-- Apart from garbage, an attempt has one volume of each name, a transfer has one volume, and an
-- artifact has one unfinished copy on each worker.
CREATE UNIQUE INDEX volumes_one_of_name ON volumes (attempt_id, name) WHERE attempt_id IS NOT NULL AND given_up = FALSE;
CREATE UNIQUE INDEX volumes_one_of_transfer ON volumes (transfer_id) WHERE transfer_id IS NOT NULL AND given_up = FALSE;
CREATE UNIQUE INDEX volumes_one_copy ON volumes (artifact_id, worker_id) WHERE is_copy = TRUE AND complete = FALSE AND given_up = FALSE;
-- Free space as for artifacts.
-- postgres: ALTER TABLE volumes SET (fillfactor = 60);

-- Volumes that are garbage, by worker. A row is added with the mark, and deleted with the mark or
-- the volume.
CREATE TABLE sweep_queue (
    -- Worker that holds the volume.
    worker_id UUID NOT NULL,
    -- The volume.
    handle UUID NOT NULL,
    -- The volume's `judged_after` after it was handed out, so that a stream can continue where it
    -- was. NULL: not handed out.
    number BIGINT,
    -- When the volume was marked, if it is a complete replica whose artifact is deleted. Its own
    -- row shows the mark only after it was handed out, so that the mark does not write the row's
    -- page. NULL: the volume's own row has the time of the mark.
    marked_at BIGINT,
    PRIMARY KEY (worker_id, handle)
);
CREATE INDEX sweep_queue_told ON sweep_queue (worker_id, number, handle) WHERE number IS NOT NULL;

-- Containers on workers. A row is written before its container is created, and deleted after the
-- container is gone.
CREATE TABLE containers (
    -- Name on the worker. Minted here, never reused. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Worker that holds it.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- As for volumes. Containers are never unconfirmed, because their processes end with the
    -- incarnation.
    state TEXT NOT NULL CHECK (state IN ('creating', 'created', 'lost', 'destroying', 'sweeping')),
    -- Attempt that it was created for.
    attempt_id UUID NOT NULL,
    -- Workload of that attempt.
    holder_id UUID NOT NULL,
    -- When the row was created.
    created_at BIGINT NOT NULL,
    -- As for volumes.
    judged_after BIGINT NOT NULL,
    -- Reason of the mark, for people.
    mark_reason TEXT,
    -- When it was marked. NULL: not marked.
    marked_at BIGINT,
    -- When it was last used interactively. NULL: never.
    touched_at BIGINT,
    -- Since when reports do not name it. NULL: not lost.
    lost_at BIGINT,
    -- Whether the loss is in `losses`.
    loss_noticed BOOLEAN NOT NULL DEFAULT FALSE
);
CREATE INDEX containers_by_worker ON containers (worker_id, handle);
CREATE INDEX containers_marked ON containers (worker_id, state) WHERE state IN ('destroying', 'sweeping');
CREATE INDEX containers_sweeping ON containers (worker_id, judged_after, handle) WHERE state = 'sweeping';
CREATE INDEX containers_by_attempt ON containers (attempt_id);
CREATE INDEX containers_newly_lost ON containers (lost_at) WHERE state = 'lost' AND loss_noticed = FALSE;
-- Apart from garbage, an attempt has one container.
CREATE UNIQUE INDEX containers_one_of_attempt ON containers (attempt_id)
    WHERE state NOT IN ('destroying', 'sweeping');

-- Losses: volumes and containers that were missing from reports for longer than a grace period, or
-- whose worker was forgotten. Deleted after a while.
CREATE TABLE losses (
    -- Position in the order. Rises by one.
    revision BIGINT PRIMARY KEY,
    -- Worker that held it. Not a foreign key, because the worker may be forgotten.
    worker_id UUID NOT NULL,
    -- The lost volume. NULL: a container was lost.
    volume UUID,
    -- The lost container. NULL: a volume was lost.
    container UUID CHECK ((volume IS NULL) <> (container IS NULL)),
    -- Artifact whose bytes the volume held or was to hold. NULL: none.
    artifact_id UUID,
    -- Attempt that it was created for. NULL: none.
    attempt_id UUID,
    -- Since when reports did not name it.
    lost_at BIGINT NOT NULL,
    -- When the loss was noticed.
    noticed_at BIGINT NOT NULL
);
CREATE INDEX losses_by_age ON losses (noticed_at);

-- Orphans: volumes and containers on workers without a row, because this store was restored from a
-- backup. An operator adopts or purges them. A row is deleted when its orphan is adopted or purged,
-- or missing from a report.
CREATE TABLE orphans (
    -- Name on the worker, minted by this store in an earlier life. Sorts by age.
    handle UUID PRIMARY KEY,
    -- Kind.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container')),
    -- Worker that holds it.
    worker_id UUID NOT NULL REFERENCES workers (worker_id),
    -- When a report first named it.
    first_seen_at BIGINT NOT NULL,
    -- Only a report with a higher token can show that it is gone. The worker's sequence when the
    -- row was created.
    judged_after BIGINT NOT NULL,
    -- Whether the worker's gateway has described it in the columns below. Containers are not
    -- described.
    described BOOLEAN NOT NULL,
    -- Volume of which it is a copy-on-write child.
    parent UUID,
    -- Team of the artifact. NULL: unknown.
    team TEXT,
    -- Artifact whose bytes it held or was to hold. NULL: unknown.
    artifact_id UUID,
    -- Digest of its tree. NULL: without final bytes, or unknown.
    digest BYTEA,
    -- Bytes of its files, if the digest is known.
    size_bytes BIGINT NOT NULL
);
CREATE INDEX orphans_by_worker ON orphans (worker_id, handle);
CREATE INDEX orphans_by_parent ON orphans (parent) WHERE parent IS NOT NULL;
CREATE INDEX orphans_by_artifact ON orphans (artifact_id) WHERE artifact_id IS NOT NULL;

-- Deleted volumes, containers and caches, with the reason.
CREATE TABLE deletion_log (
    -- Former handle or id.
    id UUID PRIMARY KEY,
    -- Kind.
    kind TEXT NOT NULL CHECK (kind IN ('volume', 'container', 'resource_cache', 'task_cache')),
    -- Team that may read the entry. NULL: every team.
    team TEXT,
    -- Name of a cache, for people. Empty: no name.
    label TEXT NOT NULL,
    -- Reason of the mark or deletion, for people.
    mark_reason TEXT,
    -- When it was marked. NULL: deleted without a mark, or unknown.
    marked_at BIGINT,
    -- When a report no longer named it, or when the cache was deleted.
    gone_at BIGINT NOT NULL,
    -- When to check whether the entry can be forgotten.
    due_at BIGINT NOT NULL
);
CREATE INDEX deletion_log_due ON deletion_log (due_at);
