-- So that workloads are listed by how they ended.

-- succeeded, failed, errored, aborted. Set once finished.
ALTER TABLE workloads ADD COLUMN outcome TEXT;
UPDATE workloads SET outcome = CASE
    WHEN ending LIKE '{"outcome":"Succeeded"%' THEN 'succeeded'
    WHEN ending LIKE '{"outcome":"Failed"%' THEN 'failed'
    WHEN ending LIKE '{"outcome":"Errored"%' THEN 'errored'
    WHEN ending LIKE '{"outcome":"Aborted"%' THEN 'aborted'
END WHERE state = 'finished';
-- Who asks for those that succeeded finds them by team or by age.
CREATE INDEX workloads_by_outcome ON workloads (outcome, sequence) WHERE outcome <> 'succeeded';
