-- Caches and what else owns artifacts beside builds. What each of them owns stands in its own row, in `artifact_id`. Whoever puts it there has
-- locked the artifact.

-- What was fetched for a resource, to be fetched once.
CREATE TABLE resource_caches (
    -- Its id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- To whom it is answered: this team. Empty: every team, on purpose.
    scope TEXT NOT NULL,
    -- What makes it this cache and no other.
    key_digest BYTEA NOT NULL,
    -- The type of the resource, its version and its parameters, for people.
    resource_type TEXT NOT NULL,
    version TEXT NOT NULL,
    params TEXT NOT NULL,
    -- Who made it, or makes it.
    team TEXT NOT NULL,
    -- The claim under which that is done, chosen by the maker.
    claim_id UUID NOT NULL UNIQUE,
    -- Until when the maker may take, unless it renews the claim. NULL: it was made. At least a full term after a store started.
    claimed_until BIGINT CHECK ((claimed_until IS NULL) = (artifact_id IS NOT NULL)),
    -- What it owns. NULL: it is being made.
    artifact_id UUID REFERENCES artifacts (artifact_id),
    -- When it was last answered, put, used or released, as far as that was noticed: the end of a use is noticed by who looks.
    last_used BIGINT NOT NULL,
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When to look whether it goes.
    look_at BIGINT NOT NULL,
    UNIQUE (scope, key_digest)
);
CREATE INDEX resource_caches_by_artifact ON resource_caches (artifact_id) WHERE artifact_id IS NOT NULL;
CREATE INDEX resource_caches_to_look_at ON resource_caches (look_at);

-- Who uses which resource cache. A use counts until its build has let go or its workload was settled, whether its row is there or not: the row goes
-- when somebody looks.
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

-- What a step of a job leaves in a path for the next time.
CREATE TABLE task_caches (
    -- Its id, minted here. Sorts by age.
    cache_id UUID PRIMARY KEY,
    -- Whose it is.
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

-- Images of the types of resources that come with the system. For every team.
CREATE TABLE base_resource_types (
    -- Its id, minted here. The versions that follow one another have the same. Sorts by age.
    base_type_id UUID PRIMARY KEY,
    -- The type.
    resource_type TEXT NOT NULL,
    -- Its version, for people.
    version TEXT NOT NULL,
    -- The worker that has it. NULL: the centre, for all workers.
    worker_id UUID,
    -- What it is.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX base_resource_types_by_artifact ON base_resource_types (artifact_id);
CREATE UNIQUE INDEX base_resource_types_of_worker ON base_resource_types (resource_type, worker_id) WHERE worker_id IS NOT NULL;
CREATE UNIQUE INDEX base_resource_types_of_centre ON base_resource_types (resource_type) WHERE worker_id IS NULL;

-- The certs that a worker gives to resources. For every team.
CREATE TABLE resource_certs (
    -- The worker.
    worker_id UUID PRIMARY KEY,
    -- What they are.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id)
);
CREATE INDEX resource_certs_by_artifact ON resource_certs (artifact_id);
