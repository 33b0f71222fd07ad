-- A replica that goes with its artifact is marked by its row in `marks` alone: its own row stays as it is, in whatever page it lies.

-- When the volume was marked, if it is a complete replica whose artifact is deleted: its own row does not say so until its gateway was told. NULL:
-- its own row says when it was marked.
ALTER TABLE marks ADD COLUMN marked_at BIGINT;

-- Whose own row says that it is garbage is in nobody's way.
UPDATE volumes SET given_up = TRUE
    WHERE state = 'destroying' AND given_up = FALSE AND transfer_id IS NOT NULL AND handle IN (SELECT handle FROM marks);

-- Whether something fills an artifact is found without a look at its replicas.
CREATE INDEX volumes_unfinished ON volumes (artifact_id) WHERE complete = FALSE AND artifact_id IS NOT NULL;
