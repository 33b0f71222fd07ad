-- Reports that were judged have receipts.

-- The key of the receipts for reports that this store has judged: 32 bytes. A restored backup has the same. NULL: none was made yet.
ALTER TABLE store ADD COLUMN receipt_key BYTEA;
