-- What workers bring along, as their gateways said last, and the artifact that was made of it, or is. That it was made says the owner: the base
-- resource type or the certs of the worker, which have the same artifact then.
CREATE TABLE imports (
    -- The worker that brings it along.
    worker_id UUID NOT NULL,
    -- The resource type whose image it is. Empty: the certs of the worker.
    resource_type TEXT NOT NULL,
    -- Its id, minted here. The versions that follow one another have the same. Sorts by age.
    import_id UUID NOT NULL UNIQUE,
    -- The version, and where on the worker it is: with others it is imported again.
    version TEXT NOT NULL,
    path TEXT NOT NULL,
    -- What it becomes, and the volume that was made for it. They may be gone: then they are minted anew.
    artifact_id UUID NOT NULL,
    volume UUID NOT NULL,
    -- When and why the last try failed. NULL: none did since version and path are these, or since it was imported.
    failed_at BIGINT,
    failed_why TEXT CHECK ((failed_why IS NULL) = (failed_at IS NULL)),
    PRIMARY KEY (worker_id, resource_type)
);
