-- Tables of the scheduler: workers, leases, workloads with their events, and the outbox to the
-- artifact store. Instants are microseconds since 1970 by the clock of the service. JSON columns
-- are read by this service only.

-- The key that signs lease tokens, session credentials and tickets. Exactly one row, written at the
-- first start.
CREATE TABLE signing_keys (
    -- Always 1.
    id BIGINT PRIMARY KEY,
    -- Seed of an Ed25519 key, 32 bytes.
    seed BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);

-- One row for each worker. Heartbeats do not write it.
CREATE TABLE workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- Desired state: run, cordon, retire. A registration never changes it.
    desired TEXT NOT NULL,
    -- Observed state: running, stalled, lost.
    state TEXT NOT NULL,
    -- Generation of the desired state that its gateway receives. Raised by each change of that
    -- state.
    generation BIGINT NOT NULL,
    -- Number of live leases that use a slot. Written only together with such a lease.
    active_tasks BIGINT NOT NULL CHECK (active_tasks >= 0),
    -- Checks among these leases, and the sums of their requests. Written only together with such a
    -- lease.
    active_checks BIGINT NOT NULL DEFAULT 0 CHECK (active_checks >= 0),
    reserved_cpu_millis BIGINT NOT NULL DEFAULT 0 CHECK (reserved_cpu_millis >= 0),
    reserved_memory_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_memory_bytes >= 0),
    reserved_disk_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_disk_bytes >= 0),
    -- Number of ended leases that used a slot. Replicas derive from it how fast slots become free.
    ended_tasks BIGINT NOT NULL DEFAULT 0,
    -- Limits. NULL: no limit.
    max_tasks BIGINT,
    max_containers BIGINT,
    max_volumes BIGINT,
    -- Capacity. NULL: not declared.
    cpu_millis BIGINT,
    memory_bytes BIGINT,
    disk_bytes BIGINT NOT NULL,
    -- Incarnation of the worker, and session of its gateway.
    incarnation BIGINT NOT NULL,
    session BIGINT NOT NULL,
    gateway_instance UUID NOT NULL,
    -- Identity of the present incarnation.
    marker_id UUID NOT NULL,
    boot_id TEXT NOT NULL,
    -- Address of its gateway.
    endpoint TEXT NOT NULL,
    -- JSON: platform, tags, team, image kinds, capabilities.
    labels TEXT NOT NULL,
    registered_at BIGINT NOT NULL,
    -- While cordoned or retired: when uninterruptible workloads are interrupted too. NULL: never,
    -- or already done.
    interrupt_at BIGINT,
    -- While cordoned or retired: since when no uninterruptible lease is left.
    landed_at BIGINT,
    -- While retired: whether last replicas may be lost.
    force_retire BOOLEAN NOT NULL DEFAULT FALSE,
    -- While retired: why the artifact store does not let the worker go, although no lease is left.
    -- Empty: unknown.
    blocked_by TEXT NOT NULL DEFAULT '',
    -- The decided removal, which waits only for the end of leases: pruned, expired. NULL: none.
    leaving TEXT,
    -- Whether the worker is removed once it is lost.
    ephemeral BOOLEAN NOT NULL DEFAULT FALSE,
    -- JSON: protocol versions of its gateway, if this scheduler supports none of them. Empty list
    -- otherwise.
    unsupported_versions TEXT NOT NULL DEFAULT '[]',
    -- Number of consecutive attempts that failed before their process started, through the fault of
    -- the worker, and the last failure.
    failures BIGINT NOT NULL DEFAULT 0,
    last_failure TEXT NOT NULL DEFAULT '',
    -- The team of all consecutive failures. NULL: no failures, or failures of several teams.
    failed_team TEXT,
    -- Number of consecutive quarantines, and the end of the present one. NULL: not quarantined.
    quarantines BIGINT NOT NULL DEFAULT 0,
    quarantined_until BIGINT,
    -- Revision of the last change that watchers see.
    revision BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX workers_by_revision ON workers (revision);
CREATE INDEX workers_leaving ON workers (id) WHERE desired <> 'run' OR leaving IS NOT NULL;
CREATE INDEX workers_lost_for_good ON workers (id) WHERE ephemeral = TRUE AND state = 'lost';
CREATE INDEX workers_quarantined ON workers (quarantined_until) WHERE quarantined_until IS NOT NULL;
-- The counters change with each lease. Free space on each page allows updates without index
-- changes.
-- postgres: ALTER TABLE workers SET (fillfactor = 50);

-- The source of worker revisions, in the order of commits. A transaction that changes a worker
-- locks this row until it commits. Exactly one row.
CREATE TABLE worker_revisions (
    -- Always 1.
    id BIGINT PRIMARY KEY,
    -- The newest revision.
    last BIGINT NOT NULL,
    -- The revision up to which records of removed workers were deleted.
    forgotten BIGINT NOT NULL
);
INSERT INTO worker_revisions (id, last, forgotten) VALUES (1, 1, 0);

-- The last heartbeat of each worker, in a separate table so that heartbeats do not contend with
-- placement.
CREATE TABLE heartbeats (
    worker_id UUID PRIMARY KEY REFERENCES workers (id) ON DELETE CASCADE,
    last_contact_at BIGINT NOT NULL,
    -- Start of the TTL that a worker has to return after the scheduler started or was without its
    -- database.
    patient_since BIGINT NOT NULL,
    -- Whether a stream of the present session is open, as far as is known. False: another gateway
    -- may take over at once.
    attended BOOLEAN NOT NULL,
    -- Contents of the worker, as last reported.
    containers BIGINT NOT NULL,
    volumes BIGINT NOT NULL,
    disk_free_bytes BIGINT NOT NULL,
    -- Containers that are kept although no lease uses them any more.
    kept_containers BIGINT NOT NULL DEFAULT 0
);
-- postgres: ALTER TABLE heartbeats SET (fillfactor = 50);

-- Records of removed workers, kept for as long as finished workloads.
CREATE TABLE removed_workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL,
    -- Marker of a retired worker, which may not register again. NULL: it may.
    marker_id UUID,
    -- retired, pruned, expired.
    how TEXT NOT NULL,
    removed_at BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    -- Whether the artifact store has forgotten the worker, too.
    store_told BOOLEAN NOT NULL
);
CREATE INDEX removed_workers_by_name ON removed_workers (name);
CREATE INDEX removed_workers_by_revision ON removed_workers (revision);
CREATE INDEX removed_workers_untold ON removed_workers (id) WHERE store_told = FALSE;

-- One row for each accepted workload.
CREATE TABLE workloads (
    -- Chosen by the caller.
    id UUID PRIMARY KEY,
    -- Time-ordered id, generated at submission. Ids of callers do not sort by age.
    sequence UUID NOT NULL UNIQUE,
    team TEXT NOT NULL,
    -- The validated spec. The digest distinguishes a repeat from another workload with the same id.
    spec BYTEA NOT NULL,
    spec_digest BYTEA NOT NULL,
    -- Whether part of the spec was deleted, because the workload has finished.
    abridged BOOLEAN NOT NULL DEFAULT FALSE,
    -- W3C trace context of the submitting call. Empty: none.
    traceparent TEXT NOT NULL,
    -- Whether the artifact store must settle the workload: it has inputs, outputs or a build.
    settles BOOLEAN NOT NULL,
    -- accepted, pending, assigned, starting, running, settling, finished.
    state TEXT NOT NULL,
    -- Priority in the queue, the highest first.
    priority BIGINT NOT NULL DEFAULT 0,
    -- Whether the workload may be interrupted when its worker is cordoned or retired.
    interruptible BOOLEAN NOT NULL DEFAULT FALSE,
    -- Revision of the newest event. Raised under the lock of this row, so revisions become visible
    -- in order.
    revision BIGINT NOT NULL,
    submitted_at BIGINT NOT NULL,
    started_at BIGINT,
    finished_at BIGINT,
    -- Queue deadline, after which a pending workload errors. NULL: none.
    queue_deadline BIGINT,
    -- Start timeout of an attempt, in microseconds. NULL: none.
    start_timeout_us BIGINT,
    -- Run deadline, after which the process is stopped. NULL: not started, or no limit.
    run_deadline BIGINT,
    -- The present lease and attempt. NULL unless assigned, starting or running.
    lease_id UUID,
    attempt_id UUID,
    -- Number of used retries.
    retried BIGINT NOT NULL DEFAULT 0,
    -- JSON: workers on which attempts failed before their process started, through the fault of the
    -- worker, with the failures.
    failed_on TEXT NOT NULL DEFAULT '[]',
    -- JSON: worker and gateway of the present or last attempt.
    location TEXT,
    -- JSON: locations of the inputs when they were pinned.
    locations TEXT NOT NULL,
    -- JSON: reasons for waiting while pending, one line for each worker, or the reason of a requeue.
    waiting_for TEXT NOT NULL,
    -- JSON: the end of the workload. Set from settling on.
    ending TEXT,
    -- succeeded, failed, errored, aborted. Set once finished.
    outcome TEXT
);
CREATE INDEX workloads_by_team ON workloads (team, sequence);
CREATE INDEX workloads_by_state ON workloads (state, sequence);
-- Other outcomes than succeeded are few. Succeeded workloads are found by team or by age.
CREATE INDEX workloads_by_outcome ON workloads (outcome, sequence) WHERE outcome <> 'succeeded';
CREATE INDEX workloads_accepted ON workloads (submitted_at) WHERE state = 'accepted';
CREATE INDEX workloads_queue_deadline ON workloads (queue_deadline) WHERE state = 'pending' AND queue_deadline IS NOT NULL;
CREATE INDEX workloads_start_timeout ON workloads (lease_id) WHERE state = 'assigned' AND start_timeout_us IS NOT NULL;
CREATE INDEX workloads_run_deadline ON workloads (run_deadline) WHERE run_deadline IS NOT NULL;
CREATE INDEX workloads_finished ON workloads (finished_at) WHERE state = 'finished';

-- Events of each workload, for watchers.
CREATE TABLE events (
    workload_id UUID NOT NULL REFERENCES workloads (id) ON DELETE CASCADE,
    revision BIGINT NOT NULL,
    at BIGINT NOT NULL,
    -- JSON.
    event TEXT NOT NULL,
    PRIMARY KEY (workload_id, revision)
);

-- Results of workloads that keep them: the standard output of the process.
CREATE TABLE results (
    workload_id UUID PRIMARY KEY REFERENCES workloads (id) ON DELETE CASCADE,
    result BYTEA NOT NULL
);

-- Leases. An ended lease is kept for as long as a repeat of its calls may arrive.
CREATE TABLE leases (
    id UUID PRIMARY KEY,
    worker_id UUID NOT NULL REFERENCES workers (id),
    incarnation BIGINT NOT NULL,
    -- task, get, put, check and service use a slot; transfer uses none.
    kind TEXT NOT NULL,
    team TEXT NOT NULL,
    -- granted, ending, ended.
    state TEXT NOT NULL,
    -- The first generation of its worker's desired state that contains the lease. Without meaning
    -- for a lease that is not in use.
    generation BIGINT NOT NULL,
    -- The workload and its attempt. NULL: a driven lease, which its holder renews.
    workload_id UUID REFERENCES workloads (id) ON DELETE CASCADE,
    attempt_id UUID,
    -- Requested resources besides the slot.
    cpu_millis BIGINT NOT NULL DEFAULT 0,
    memory_bytes BIGINT NOT NULL DEFAULT 0,
    disk_bytes BIGINT NOT NULL DEFAULT 0,
    -- Whether processes may run under the lease, so that its gateway receives it. Always true for
    -- an attempt. A driven lease is in use from the first UseLease on.
    in_use BOOLEAN NOT NULL DEFAULT FALSE,
    -- Whether the artifact store keeps pins or containers under the id of this lease, and must be
    -- called when the lease ends.
    settles BOOLEAN NOT NULL DEFAULT FALSE,
    -- The owner of the containers under this lease. Empty: none.
    owner TEXT NOT NULL DEFAULT '',
    -- Phase of the attempt, as its gateway reported it. 0 none, 1 preparing, 2 running, 3
    -- publishing, 4 ended.
    phase BIGINT NOT NULL,
    -- While ending: the reason (CANCELLED, RELEASED), and the grace period in microseconds.
    stop_reason TEXT,
    stop_grace_us BIGINT,
    -- Of a driven lease: the request as JSON, which distinguishes a repeat from another request.
    request TEXT NOT NULL,
    -- Of a driven lease: its expiry. At least one full term after a start of the scheduler.
    expires_at BIGINT,
    granted_at BIGINT NOT NULL,
    ended_at BIGINT,
    -- Once ended: reported (by its holder), or lost (without its holder).
    ended_by TEXT
);
-- Invariant: a workload has at most one live lease.
CREATE UNIQUE INDEX leases_live_of_workload ON leases (workload_id) WHERE state <> 'ended' AND workload_id IS NOT NULL;
CREATE INDEX leases_of_workload ON leases (workload_id) WHERE workload_id IS NOT NULL;
CREATE INDEX leases_live_of_worker ON leases (worker_id) WHERE state <> 'ended';
CREATE INDEX leases_live_of_owner ON leases (team, owner) WHERE state <> 'ended' AND owner <> '';
CREATE INDEX leases_expiring ON leases (expires_at) WHERE state = 'granted' AND expires_at IS NOT NULL;
CREATE INDEX leases_ended ON leases (ended_at) WHERE state = 'ended';

-- The worker of each owner's containers. Leases of the owner are granted only there, as long as
-- that worker takes work.
CREATE TABLE owner_affinity (
    team TEXT NOT NULL,
    owner TEXT NOT NULL,
    worker_id UUID NOT NULL,
    -- Time of the last grant to the owner.
    granted_at BIGINT NOT NULL,
    PRIMARY KEY (team, owner)
);
CREATE INDEX owner_affinity_by_age ON owner_affinity (granted_at);

-- Workers that are reserved for one request, so that a large request does not starve. If several
-- replicas queue the same request, one of them reserves, and no other changes its row.
CREATE TABLE reservations (
    -- The id of the request itself: the request gets no reservation for a time.
    worker_id UUID NOT NULL PRIMARY KEY,
    -- A workload, or the queue id of a waiting call.
    request_id UUID NOT NULL,
    -- Expiry, unless the replica extends it.
    expires_at BIGINT NOT NULL,
    -- The process that made the reservation.
    replica UUID NOT NULL
);

-- Waiting calls for leases, which only their replica can answer. Other replicas read their order
-- and number.
CREATE TABLE peer_waiters (
    -- The process that holds the calls.
    replica UUID NOT NULL PRIMARY KEY,
    -- Counter that the process raises while it runs.
    beat BIGINT NOT NULL,
    -- The beat of the last change.
    changed BIGINT NOT NULL,
    -- JSON: the calls, by their requirements.
    calls TEXT NOT NULL
);

-- Calls to the artifact store that are not acknowledged yet. Written with the change that causes
-- the call.
CREATE TABLE outbox (
    id UUID PRIMARY KEY,
    -- A workload, or a driven lease.
    holder_id UUID NOT NULL,
    -- JSON: settle, or end an attempt, with all arguments of the call.
    message TEXT NOT NULL,
    tries BIGINT NOT NULL,
    -- End of the claim of the replica that wrote or claimed the row. After it, any replica may
    -- deliver.
    due_at BIGINT NOT NULL
);
CREATE INDEX outbox_due ON outbox (due_at);
CREATE INDEX outbox_of_holder ON outbox (holder_id);
