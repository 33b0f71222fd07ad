-- Rows that are written again and again have room beside them for what they become, so that no index has to hear of it: the counters of
-- workers with each lease, contacts with each message.

-- postgres: ALTER TABLE workers SET (fillfactor = 50);
-- postgres: ALTER TABLE worker_contacts SET (fillfactor = 50);
SELECT 1;
