-- Calls for leases that wait, which are held by their replicas alone: so that others know who is before whom, and what waits in all.

CREATE TABLE waiting_calls (
    -- The process that holds them.
    replica UUID NOT NULL PRIMARY KEY,
    -- Counted up as long as it is there.
    beat BIGINT NOT NULL,
    -- The beat at which they changed last.
    changed BIGINT NOT NULL,
    -- JSON: the calls, by what they ask for.
    calls TEXT NOT NULL
);
