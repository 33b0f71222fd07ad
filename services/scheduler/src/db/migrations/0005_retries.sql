-- Workloads whose process must start in time, and those that may begin again.

-- How long an attempt may take until its process counts as started. NULL: for ever.
ALTER TABLE workloads ADD COLUMN start_timeout_us BIGINT;
-- How often it has begun again of those times that its spec allows.
ALTER TABLE workloads ADD COLUMN retried BIGINT NOT NULL DEFAULT 0;
CREATE INDEX workloads_start_timeout ON workloads (lease_id) WHERE state = 'assigned' AND start_timeout_us IS NOT NULL;
