-- Small trees, from which artifacts were made without a worker.

-- Whether the tree that it was made from is in `trees`, so that it has its bytes without a replica.
ALTER TABLE artifacts ADD COLUMN in_store BOOLEAN NOT NULL DEFAULT FALSE;

-- The trees themselves, apart from their artifacts, of which many are read where the bytes do not matter.
CREATE TABLE trees (
    -- Whose bytes they are. Goes with its row, when the tombstone is over.
    artifact_id UUID PRIMARY KEY REFERENCES artifacts (artifact_id),
    -- `gantry.artifacts.v1.SmallTree`, encoded, as its caller handed it over.
    tree BYTEA NOT NULL
);
