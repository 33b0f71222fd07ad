-- So that attempts of one team that fail set a worker aside for that team and for no other.

-- The team of all failures in a row. NULL: there were none, or those of several teams.
ALTER TABLE workers ADD COLUMN failed_team TEXT;
