-- Name of a workload, for people. Several workloads may have the same name. Empty: none.
ALTER TABLE workloads ADD COLUMN name TEXT NOT NULL DEFAULT '';
CREATE INDEX workloads_by_name ON workloads (team, name, sequence) WHERE name <> '';
-- Workloads that have not ended are few. A name stands for one of them first.
CREATE INDEX workloads_unfinished_by_name ON workloads (team, name, sequence) WHERE state <> 'finished' AND name <> '';
CREATE INDEX workloads_unfinished ON workloads (team, sequence) WHERE state <> 'finished';
-- People give the beginning of an id, which is a range.
CREATE INDEX workloads_by_team_and_id ON workloads (team, id);
