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

-- A row for each worker that ever said hello. Heartbeats do not touch it.
CREATE TABLE workers (
    id UUID PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    -- What shall be: run, land, retire. A reconnect never changes it.
    desired TEXT NOT NULL,
    -- What is: running, stalled, lost.
    state TEXT NOT NULL,
    -- Of the complete state that its gateway is told; raised by whatever changes that state.
    generation BIGINT NOT NULL,
    -- How many leases that take a slot have not ended. Changed only together with such a lease.
    active_tasks BIGINT NOT NULL CHECK (active_tasks >= 0),
    -- Slots. NULL: no limit.
    max_tasks BIGINT,
    -- The life of what it holds, and the life of who speaks for it.
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
    disk_bytes BIGINT NOT NULL,
    registered_at BIGINT NOT NULL
);

-- When each worker was last in contact: apart, so that heartbeats never contend with placing.
CREATE TABLE worker_contacts (
    worker_id UUID PRIMARY KEY REFERENCES workers (id) ON DELETE CASCADE,
    last_contact_at BIGINT NOT NULL,
    -- A scheduler that starts, or was without its database for a while, gives every worker a full term from here on.
    patient_since BIGINT NOT NULL,
    -- Whether a stream of its present session is open, as far as is known. False: another gateway may take over at once.
    attended BOOLEAN NOT NULL,
    -- What it last said that it keeps.
    containers BIGINT NOT NULL,
    volumes BIGINT NOT NULL,
    disk_free_bytes BIGINT NOT NULL
);

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
    -- W3C trace context of the call that submitted it. Empty: none.
    traceparent TEXT NOT NULL,
    -- Whether the artifact store must settle it: it has inputs, outputs or a build.
    settles BOOLEAN NOT NULL,
    -- accepted, pending, assigned, starting, running, settling, finished.
    state TEXT NOT NULL,
    -- The revision of its newest event. Raised under this row's lock, so revisions become visible in their order.
    revision BIGINT NOT NULL,
    submitted_at BIGINT NOT NULL,
    started_at BIGINT,
    finished_at BIGINT,
    -- Past it, while pending, it errors. NULL: it may wait for ever.
    queue_deadline BIGINT,
    -- Past it, while its process may run, it is stopped. NULL: not started, or it may run for ever.
    run_deadline BIGINT,
    -- The present lease and attempt. NULL unless assigned, starting or running.
    lease_id UUID,
    attempt_id UUID,
    -- JSON: where the present or last attempt is.
    whereabouts TEXT,
    -- JSON: where its inputs were when they were pinned.
    locations TEXT NOT NULL,
    -- JSON: while pending, why, one line a worker.
    waiting_for TEXT NOT NULL,
    -- JSON: how it ended. Set from settling on.
    ending TEXT
);
CREATE INDEX workloads_by_team ON workloads (team, sequence);
CREATE INDEX workloads_by_state ON workloads (state, sequence);
CREATE INDEX workloads_accepted ON workloads (submitted_at) WHERE state = 'accepted';
CREATE INDEX workloads_queue_deadline ON workloads (queue_deadline) WHERE state = 'pending' AND queue_deadline IS NOT NULL;
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
    -- task: of a workload, takes a slot. transfer: driven by its holder, takes none.
    kind TEXT NOT NULL,
    team TEXT NOT NULL,
    -- granted, ending, ended.
    state TEXT NOT NULL,
    -- The first generation of its worker's desired state that names it.
    generation BIGINT NOT NULL,
    -- Of a task: what it was granted for.
    workload_id UUID REFERENCES workloads (id) ON DELETE CASCADE,
    attempt_id UUID,
    -- Of a task: how far its gateway said it is. 0 nothing, 1 preparing, 2 running, 3 publishing, 4 ended.
    phase BIGINT NOT NULL,
    -- While ending: why it shall stop (CANCELLED, RUN_TIMEOUT), and how long it may take.
    stop_reason TEXT,
    stop_grace_us BIGINT,
    -- Of a transfer: what was asked for, to tell a repeat from another request; JSON.
    request TEXT NOT NULL,
    -- Of a transfer: it ends then unless it is renewed. At least a full term after a scheduler started.
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
CREATE INDEX leases_expiring ON leases (expires_at) WHERE state <> 'ended' AND expires_at IS NOT NULL;
CREATE INDEX leases_ended ON leases (ended_at) WHERE state = 'ended';

-- What the artifact store must still be told. Written with the change that causes it, removed once acknowledged.
CREATE TABLE outbox (
    id UUID PRIMARY KEY,
    workload_id UUID NOT NULL,
    -- JSON: settle or end an attempt, with all that the call needs.
    message TEXT NOT NULL,
    tries BIGINT NOT NULL,
    -- Until then whoever wrote or claimed it delivers it; after it anyone may.
    due_at BIGINT NOT NULL
);
CREATE INDEX outbox_due ON outbox (due_at);
CREATE INDEX outbox_of_workload ON outbox (workload_id);
