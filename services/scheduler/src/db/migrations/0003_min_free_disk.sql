-- Free disk space below which the worker gets no new work, in bytes. 0: no limit.
ALTER TABLE workers ADD COLUMN min_free_disk_bytes BIGINT NOT NULL DEFAULT 0;
