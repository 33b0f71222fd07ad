-- Leases for everything that is placed, in batches, with amounts and limits.

-- Limits and amounts of a worker. NULL: none, or it does not say.
ALTER TABLE workers ADD COLUMN max_containers BIGINT;
ALTER TABLE workers ADD COLUMN max_volumes BIGINT;
ALTER TABLE workers ADD COLUMN cpu_millis BIGINT;
ALTER TABLE workers ADD COLUMN memory_bytes BIGINT;
-- Of the leases that active_tasks counts: those of checks, and what was asked for. Changed only together with such a lease.
ALTER TABLE workers ADD COLUMN active_checks BIGINT NOT NULL DEFAULT 0 CHECK (active_checks >= 0);
ALTER TABLE workers ADD COLUMN reserved_cpu_millis BIGINT NOT NULL DEFAULT 0 CHECK (reserved_cpu_millis >= 0);
ALTER TABLE workers ADD COLUMN reserved_memory_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_memory_bytes >= 0);
ALTER TABLE workers ADD COLUMN reserved_disk_bytes BIGINT NOT NULL DEFAULT 0 CHECK (reserved_disk_bytes >= 0);

-- Of the containers: those that are kept although no lease uses them any more.
ALTER TABLE worker_contacts ADD COLUMN kept_containers BIGINT NOT NULL DEFAULT 0;

-- What a lease takes of its worker besides a slot.
ALTER TABLE leases ADD COLUMN cpu_millis BIGINT NOT NULL DEFAULT 0;
ALTER TABLE leases ADD COLUMN memory_bytes BIGINT NOT NULL DEFAULT 0;
ALTER TABLE leases ADD COLUMN disk_bytes BIGINT NOT NULL DEFAULT 0;

-- Of those that wait, the highest first.
ALTER TABLE workloads ADD COLUMN priority BIGINT NOT NULL DEFAULT 0;
