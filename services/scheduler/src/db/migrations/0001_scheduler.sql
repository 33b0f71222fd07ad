-- What the scheduler knows: workers, leases, workloads and their events, and what it owes the artifact store.
-- Instants are microseconds since 1970 by the database's service; JSON is text that only this service reads.

-- What signs lease tokens, session credentials and tickets. Exactly one row, made at the first start.
CREATE TABLE signing_keys (
    -- Always 1.
    id BIGINT PRIMARY KEY,
    -- 32 bytes of an Ed25519 secret.
    seed BYTEA NOT NULL,
    created_at BIGINT NOT NULL
);

-- A row for each worker that ever registered. Heartbeats do not touch it.
CREATE TABLE workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- What shall be: run, cordon, retire. A registration never changes it.
    desired TEXT NOT NULL,
    -- What is: running, stalled, lost.
    state TEXT NOT NULL,
    -- Of the complete state that its gateway is told; raised by whatever changes that state.
    generation BIGINT NOT NULL,
    -- How many leases that take a slot have not ended. Changed only together with such a lease.
    active_tasks BIGINT NOT NULL CHECK (active_tasks >= 0),
    -- Of these leases: those of checks, and what was asked for. Changed only together with such a lease.
    active_checks BIGINT NOT NULL DEFAULT 0 CHECK (active_checks >= 0),
    reserved_cpu_millis BIGINT NOT NULL DEFAULT 0 CHECK (reserved_cpu_millis >= 0),
    reserved_memory_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_memory_bytes >= 0),
    reserved_disk_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_disk_bytes >= 0),
    -- How many leases that took a slot have ended here, so that every replica sees how fast slots come free.
    ended_tasks BIGINT NOT NULL DEFAULT 0,
    -- Limits. NULL: none.
    max_tasks BIGINT,
    max_containers BIGINT,
    max_volumes BIGINT,
    -- Amounts. NULL: it does not say.
    cpu_millis BIGINT,
    memory_bytes BIGINT,
    disk_bytes BIGINT NOT NULL,
    -- The life of what it holds, and the life of the gateway that speaks for it.
    incarnation BIGINT NOT NULL,
    session BIGINT NOT NULL,
    gateway_instance UUID NOT NULL,
    -- What identified the present incarnation.
    marker_id UUID NOT NULL,
    boot_id TEXT NOT NULL,
    -- Where its gateway listens.
    endpoint TEXT NOT NULL,
    -- JSON: platform, tags, team, image kinds, capabilities.
    labels TEXT NOT NULL,
    registered_at BIGINT NOT NULL,
    -- While it is cordoned or retires: when what may not be interrupted is interrupted all the same. NULL: never, or that was done.
    interrupt_at BIGINT,
    -- While it is cordoned or retires: since when no lease is left that may not be interrupted.
    landed_at BIGINT,
    -- While it retires: even if that loses last replicas.
    force_retire BOOLEAN NOT NULL DEFAULT FALSE,
    -- While it retires: why it cannot, although no lease is left. Empty: nothing is known.
    held_up_by TEXT NOT NULL DEFAULT '',
    -- Its removal is decided, and only its leases must still be ended: pruned, expired. NULL: it stays.
    leaving TEXT,
    -- It is removed once it is lost.
    ephemeral BOOLEAN NOT NULL DEFAULT FALSE,
    -- JSON: the versions that its gateway speaks, where none of them is spoken here. Empty list: one is.
    unsupported_versions TEXT NOT NULL DEFAULT '[]',
    -- How many attempts in a row ended here before their process had started, through its fault, and what the last one said.
    failures BIGINT NOT NULL DEFAULT 0,
    last_failure TEXT NOT NULL DEFAULT '',
    -- The team of all failures in a row. NULL: there were none, or those of several teams.
    failed_team TEXT,
    -- How often in a row it was quarantined for that, and until when it is. NULL: it may be tried.
    quarantines BIGINT NOT NULL DEFAULT 0,
    quarantined_until BIGINT,
    -- Of the last change of it that watchers are told of.
    revision BIGINT NOT NULL DEFAULT 0
);
CREATE INDEX workers_by_revision ON workers (revision);
CREATE INDEX workers_leaving ON workers (id) WHERE desired <> 'run' OR leaving IS NOT NULL;
CREATE INDEX workers_lost_for_good ON workers (id) WHERE ephemeral = TRUE AND state = 'lost';
CREATE INDEX workers_quarantined ON workers (quarantined_until) WHERE quarantined_until IS NOT NULL;
-- The counters change with each lease: a row has room beside it for what it becomes, so that no index changes.
-- postgres: ALTER TABLE workers SET (fillfactor = 50);

-- What hands out the revisions of workers, in the order of commits: a transaction that changes a worker holds this row until it commits. Exactly one row.
CREATE TABLE worker_revisions (
    -- Always 1.
    id BIGINT PRIMARY KEY,
    -- The last one that was handed out.
    last BIGINT NOT NULL,
    -- Which workers were removed up to this one is forgotten.
    forgotten BIGINT NOT NULL
);
INSERT INTO worker_revisions (id, last, forgotten) VALUES (1, 1, 0);

-- The last heartbeat of each worker: a table of its own, so that heartbeats never contend with placing.
CREATE TABLE heartbeats (
    worker_id UUID PRIMARY KEY REFERENCES workers (id) ON DELETE CASCADE,
    last_contact_at BIGINT NOT NULL,
    -- A scheduler that starts, or was without its database for a while, gives every worker a full term from here on.
    patient_since BIGINT NOT NULL,
    -- Whether a stream of its present session is open, as far as is known. False: another gateway may take over at once.
    attended BOOLEAN NOT NULL,
    -- What the worker holds, as it said last.
    containers BIGINT NOT NULL,
    volumes BIGINT NOT NULL,
    disk_free_bytes BIGINT NOT NULL,
    -- Of the containers: those that are kept although no lease uses them any more.
    kept_containers BIGINT NOT NULL DEFAULT 0
);
-- postgres: ALTER TABLE heartbeats SET (fillfactor = 50);

-- Workers that were removed, for as long as somebody may ask.
CREATE TABLE removed_workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL,
    -- Of a worker that was retired: the one that may not register again. NULL: it may.
    marker_id UUID,
    -- retired, pruned, expired.
    how TEXT NOT NULL,
    removed_at BIGINT NOT NULL,
    revision BIGINT NOT NULL,
    -- Whether the artifact store has forgotten it, too.
    store_told BOOLEAN NOT NULL
);
CREATE INDEX removed_workers_by_name ON removed_workers (name);
CREATE INDEX removed_workers_by_revision ON removed_workers (revision);
CREATE INDEX removed_workers_untold ON removed_workers (id) WHERE store_told = FALSE;

-- A row for each workload that was accepted.
CREATE TABLE workloads (
    -- The caller's choice.
    id UUID PRIMARY KEY,
    -- Made by us at submission; sorts by age, for ids of callers do not.
    sequence UUID NOT NULL UNIQUE,
    team TEXT NOT NULL,
    -- The validated spec, and its digest: a repeat is told from another workload by it.
    spec BYTEA NOT NULL,
    spec_digest BYTEA NOT NULL,
    -- Whether part of the spec is not kept, because the workload has finished.
    abridged BOOLEAN NOT NULL DEFAULT FALSE,
    -- W3C trace context of the call that submitted it. Empty: none.
    traceparent TEXT NOT NULL,
    -- Whether the artifact store must settle it: it has inputs, outputs or a build.
    settles BOOLEAN NOT NULL,
    -- accepted, pending, assigned, starting, running, settling, finished.
    state TEXT NOT NULL,
    -- Of those that wait, the highest first.
    priority BIGINT NOT NULL DEFAULT 0,
    -- It may be interrupted when its worker goes.
    interruptible BOOLEAN NOT NULL DEFAULT FALSE,
    -- The revision of its newest event. Raised under this row's lock, so revisions become visible in their order.
    revision BIGINT NOT NULL,
    submitted_at BIGINT NOT NULL,
    started_at BIGINT,
    finished_at BIGINT,
    -- Past it, while pending, it errors. NULL: it may wait for ever.
    queue_deadline BIGINT,
    -- How long an attempt may take until its process counts as started. NULL: for ever.
    start_timeout_us BIGINT,
    -- Past it, while its process may run, it is stopped. NULL: not started, or it may run for ever.
    run_deadline BIGINT,
    -- The present lease and attempt. NULL unless assigned, starting or running.
    lease_id UUID,
    attempt_id UUID,
    -- How often it was tried again of those times that its spec allows.
    retried BIGINT NOT NULL DEFAULT 0,
    -- JSON: on which workers attempts ended before their process had started, through their fault, and what was said.
    failed_on TEXT NOT NULL DEFAULT '[]',
    -- JSON: where the present or last attempt is.
    whereabouts TEXT,
    -- JSON: where its inputs were when they were pinned.
    locations TEXT NOT NULL,
    -- JSON: while pending, why, one line a worker.
    waiting_for TEXT NOT NULL,
    -- JSON: how it ended. Set from settling on.
    ending TEXT,
    -- succeeded, failed, errored, aborted. Set once finished.
    outcome TEXT
);
CREATE INDEX workloads_by_team ON workloads (team, sequence);
CREATE INDEX workloads_by_state ON workloads (state, sequence);
-- Those that did not succeed are few; those that did are found by team or by age.
CREATE INDEX workloads_by_outcome ON workloads (outcome, sequence) WHERE outcome <> 'succeeded';
CREATE INDEX workloads_accepted ON workloads (submitted_at) WHERE state = 'accepted';
CREATE INDEX workloads_queue_deadline ON workloads (queue_deadline) WHERE state = 'pending' AND queue_deadline IS NOT NULL;
CREATE INDEX workloads_start_timeout ON workloads (lease_id) WHERE state = 'assigned' AND start_timeout_us IS NOT NULL;
CREATE INDEX workloads_run_deadline ON workloads (run_deadline) WHERE run_deadline IS NOT NULL;
CREATE INDEX workloads_finished ON workloads (finished_at) WHERE state = 'finished';

-- What happened to each workload, for those who watch it.
CREATE TABLE events (
    workload_id UUID NOT NULL REFERENCES workloads (id) ON DELETE CASCADE,
    revision BIGINT NOT NULL,
    at BIGINT NOT NULL,
    -- JSON.
    event TEXT NOT NULL,
    PRIMARY KEY (workload_id, revision)
);

-- The right to use one worker's incarnation. An ended lease is kept for as long as a repeat of its calls may come.
CREATE TABLE leases (
    id UUID PRIMARY KEY,
    worker_id UUID NOT NULL REFERENCES workers (id),
    incarnation BIGINT NOT NULL,
    -- task and check take a slot. transfer takes none.
    kind TEXT NOT NULL,
    team TEXT NOT NULL,
    -- granted, ending, ended.
    state TEXT NOT NULL,
    -- The first generation of its worker's desired state that names it.
    generation BIGINT NOT NULL,
    -- What it was granted for. NULL: a driven lease, which its holder renews.
    workload_id UUID REFERENCES workloads (id) ON DELETE CASCADE,
    attempt_id UUID,
    -- What it takes of its worker besides a slot.
    cpu_millis BIGINT NOT NULL DEFAULT 0,
    memory_bytes BIGINT NOT NULL DEFAULT 0,
    disk_bytes BIGINT NOT NULL DEFAULT 0,
    -- Whether the artifact store keeps something for it, by its id: it is told when the lease ends.
    settles BOOLEAN NOT NULL DEFAULT FALSE,
    -- Whose containers run under it. Empty: no owner's.
    owner TEXT NOT NULL DEFAULT '',
    -- Of a workload: how far its gateway said it is. 0 nothing, 1 preparing, 2 running, 3 publishing, 4 ended.
    phase BIGINT NOT NULL,
    -- While ending: why it shall stop (CANCELLED, RUN_TIMEOUT), and how long it may take.
    stop_reason TEXT,
    stop_grace_us BIGINT,
    -- Of a driven lease: what was asked for, to tell a repeat from another request; JSON.
    request TEXT NOT NULL,
    -- Of a driven lease: it ends then unless it is renewed. At least a full term after a scheduler started.
    expires_at BIGINT,
    granted_at BIGINT NOT NULL,
    ended_at BIGINT,
    -- Once ended: reported (its holder said so), or lost (it ended without its holder).
    ended_by TEXT
);
-- Invariant: a workload has at most one live lease.
CREATE UNIQUE INDEX leases_live_of_workload ON leases (workload_id) WHERE state <> 'ended' AND workload_id IS NOT NULL;
CREATE INDEX leases_of_workload ON leases (workload_id) WHERE workload_id IS NOT NULL;
CREATE INDEX leases_live_of_worker ON leases (worker_id) WHERE state <> 'ended';
CREATE INDEX leases_live_of_owner ON leases (team, owner) WHERE state <> 'ended' AND owner <> '';
CREATE INDEX leases_expiring ON leases (expires_at) WHERE state <> 'ended' AND expires_at IS NOT NULL;
CREATE INDEX leases_ended ON leases (ended_at) WHERE state = 'ended';

-- Where the containers of each owner are: its leases are granted there and nowhere else, as long as that worker takes work.
CREATE TABLE owner_affinity (
    team TEXT NOT NULL,
    owner TEXT NOT NULL,
    worker_id UUID NOT NULL,
    -- When a lease was granted to it last.
    granted_at BIGINT NOT NULL,
    PRIMARY KEY (team, owner)
);
CREATE INDEX owner_affinity_by_age ON owner_affinity (granted_at);

-- Workers that take nothing but the request that they are reserved for, so that a large request is not passed over for ever.
-- Of the replicas where the same request waits one reserves for it, and no other changes its row.
CREATE TABLE reservations (
    -- The id of the request itself: it has no reservation for a time.
    worker_id UUID NOT NULL PRIMARY KEY,
    -- A workload, or what a call is called in the queue.
    request_id UUID NOT NULL,
    -- Until then, unless the replica prolongs it.
    expires_at BIGINT NOT NULL,
    -- The process that made it, an id of its own.
    replica UUID NOT NULL
);

-- Calls for leases that wait, which are held by their replicas alone: so that the others know their order, and what waits in all.
CREATE TABLE peer_waiters (
    -- The process that holds them.
    replica UUID NOT NULL PRIMARY KEY,
    -- Counted up as long as it is there.
    beat BIGINT NOT NULL,
    -- The beat at which they changed last.
    changed BIGINT NOT NULL,
    -- JSON: the calls, by what they ask for.
    calls TEXT NOT NULL
);

-- What the artifact store must still be told. Written with the change that causes it, removed once acknowledged.
CREATE TABLE outbox (
    id UUID PRIMARY KEY,
    -- A workload, or a driven lease.
    holder_id UUID NOT NULL,
    -- JSON: settle or end an attempt, with all that the call needs.
    message TEXT NOT NULL,
    tries BIGINT NOT NULL,
    -- Until then the replica that wrote or claimed it delivers it; after it any replica may.
    due_at BIGINT NOT NULL
);
CREATE INDEX outbox_due ON outbox (due_at);
CREATE INDEX outbox_of_holder ON outbox (holder_id);
