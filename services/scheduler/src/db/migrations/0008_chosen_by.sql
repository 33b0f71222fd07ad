-- Of the replicas where the same waits one chooses the workers that are kept free for it, and no other changes what it said.

-- The process that chose, an id of its own. NULL: one of an older version.
ALTER TABLE kept_free ADD COLUMN chosen_by UUID;
