-- Why the volume is lost, for people, as its gateway reported it. NULL: not lost, or missing from a
-- report.
ALTER TABLE volumes ADD COLUMN loss_reason TEXT;
