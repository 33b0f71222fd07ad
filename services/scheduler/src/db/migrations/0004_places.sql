-- What driven leases hold, and the workers that owners of containers keep to.

-- Whether the artifact store keeps something for it, by its id: it is told when the lease ends.
ALTER TABLE leases ADD COLUMN settles BOOLEAN NOT NULL DEFAULT FALSE;
-- Whose containers run under it. Empty: nobody's in particular.
ALTER TABLE leases ADD COLUMN owner TEXT NOT NULL DEFAULT '';
CREATE INDEX leases_live_of_owner ON leases (team, owner) WHERE state <> 'ended' AND owner <> '';

-- Where the containers of each owner are: its leases are granted there and nowhere else, as long as that worker takes work.
CREATE TABLE owner_workers (
    team TEXT NOT NULL,
    owner TEXT NOT NULL,
    worker_id UUID NOT NULL,
    -- When a lease was granted to it last.
    granted_at BIGINT NOT NULL,
    PRIMARY KEY (team, owner)
);
CREATE INDEX owner_workers_by_age ON owner_workers (granted_at);
