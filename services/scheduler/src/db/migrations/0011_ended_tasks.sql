-- So that every replica sees how fast slots come free, also those that went on to somebody else in the same moment.

-- How many leases that took a slot have ended on this worker.
ALTER TABLE workers ADD COLUMN ended_tasks BIGINT NOT NULL DEFAULT 0;
