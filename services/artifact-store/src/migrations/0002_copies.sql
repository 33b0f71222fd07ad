-- Copies of sealed artifacts from worker to worker: one at a time is made for each artifact and worker.

-- Whether the transfer copies a sealed artifact. An open one is filled, and by as many transfers as like to.
ALTER TABLE volumes ADD COLUMN is_copy BOOLEAN NOT NULL DEFAULT FALSE;
CREATE UNIQUE INDEX volumes_one_copy ON volumes (artifact_id, worker_id)
    WHERE is_copy = TRUE AND complete = FALSE AND state NOT IN ('destroying', 'sweeping');
