-- Bytes on the disk that only this volume uses, and its part of the bytes on the disk, where
-- volumes that share a file have equal parts of it. NULL: not measured.
ALTER TABLE volumes ADD COLUMN exclusive_bytes BIGINT;
ALTER TABLE volumes ADD COLUMN disk_bytes BIGINT;
