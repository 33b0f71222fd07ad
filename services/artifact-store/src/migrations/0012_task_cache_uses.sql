-- Which workloads find which task caches as directories. Such a cache does not go by itself. A use ends when its workload is settled, whose row goes
-- later than this one.
CREATE TABLE task_cache_uses (
    -- What is used.
    cache_id UUID NOT NULL REFERENCES task_caches (cache_id),
    -- The workload.
    holder_id UUID NOT NULL,
    PRIMARY KEY (cache_id, holder_id)
);
CREATE INDEX task_cache_uses_by_holder ON task_cache_uses (holder_id);
