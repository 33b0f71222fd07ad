-- So that a reader of a finished workload can tell that part of its spec is not kept.

ALTER TABLE workloads ADD COLUMN abridged BOOLEAN NOT NULL DEFAULT FALSE;
