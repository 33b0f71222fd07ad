-- When each row is to be looked at, and builds of jobs.
--
-- `look_at`: what may become garbage, or may be forgotten, says when the collector shall look at it next; the rest says nothing. So a round
-- reads what is due, however much there is. Rows that were there before are looked at once.

-- Jobs, as far as builds were reported for them.
CREATE TABLE jobs (
    -- Whose it is.
    team TEXT NOT NULL,
    -- Its name, chosen by the caller.
    job TEXT NOT NULL,
    -- The highest number that was ever reported: the latest build.
    latest_number BIGINT NOT NULL,
    -- The build with that number.
    latest_build UUID NOT NULL,
    PRIMARY KEY (team, job)
);
CREATE INDEX jobs_by_build ON jobs (latest_build);

-- Builds: owners that live until they have ended and let go.
CREATE TABLE new_builds (
    -- Its id, chosen by the caller.
    build_id UUID PRIMARY KEY,
    -- Whose it is.
    team TEXT NOT NULL,
    -- The job that it is a build of. NULL: none.
    job TEXT,
    -- Its number in that job: a higher one is later. NULL without a job.
    number BIGINT CHECK ((number IS NULL) = (job IS NULL)),
    -- The workload whose settling ends it. NULL: its caller says when it has ended.
    ends_with UUID,
    -- How long it keeps its artifacts after its end at least, in microseconds.
    keep BIGINT NOT NULL,
    -- How long it lives after its caller last put it, in microseconds, unless that workload is bound to it. NULL: without limit.
    term BIGINT,
    -- When it ends by itself unless that workload was bound to it. At least a full term after a store started.
    term_ends_at BIGINT CHECK ((term_ends_at IS NULL) = (term IS NULL)),
    -- Whether that workload was bound to it: from then on it does not end by its term.
    bound BOOLEAN NOT NULL,
    -- succeeded, failed, errored, aborted. NULL: it goes on.
    status TEXT CHECK (status IN ('succeeded', 'failed', 'errored', 'aborted')),
    -- When it ended. NULL: it goes on.
    ended_at BIGINT CHECK ((ended_at IS NULL) = (status IS NULL)),
    -- When it lets go of its artifacts. NULL: it goes on, or it is the latest of its job and did not succeed.
    kept_until BIGINT CHECK (kept_until IS NULL OR ended_at IS NOT NULL),
    -- When its row was made.
    created_at BIGINT NOT NULL,
    -- When to look at it. NULL: whatever changes it says so.
    look_at BIGINT
);
INSERT INTO new_builds
    SELECT build_id, team, NULL, NULL, ends_with, keep, term, term_ends_at, bound, status, ended_at, kept_until, created_at, 0 FROM builds;
CREATE TABLE new_owners (
    -- What is owned.
    artifact_id UUID NOT NULL REFERENCES artifacts (artifact_id),
    -- By whom. A build that lets go loses its rows.
    build_id UUID NOT NULL REFERENCES new_builds (build_id),
    PRIMARY KEY (artifact_id, build_id)
);
INSERT INTO new_owners SELECT artifact_id, build_id FROM owners;
DROP TABLE owners;
DROP TABLE builds;
ALTER TABLE new_builds RENAME TO builds;
ALTER TABLE new_owners RENAME TO owners;
CREATE INDEX builds_by_workload ON builds (ends_with) WHERE ends_with IS NOT NULL;
CREATE INDEX builds_to_look_at ON builds (look_at) WHERE look_at IS NOT NULL;
CREATE UNIQUE INDEX builds_one_of_number ON builds (team, job, number) WHERE job IS NOT NULL;
CREATE INDEX owners_by_build ON owners (build_id);

-- Nobody need own it until then. NULL: somebody must, once anybody did.
ALTER TABLE artifacts ADD COLUMN kept_until BIGINT;
-- When to look at it. NULL: an owner lives, and says when it lets go.
ALTER TABLE artifacts ADD COLUMN look_at BIGINT;
UPDATE artifacts SET look_at = 0;
DROP INDEX artifacts_never_owned;
DROP INDEX artifacts_deleting;
CREATE INDEX artifacts_to_look_at ON artifacts (look_at) WHERE look_at IS NOT NULL AND state <> 'deleting';
CREATE INDEX artifacts_to_empty ON artifacts (look_at) WHERE look_at IS NOT NULL AND state = 'deleting';

-- When to look at it. NULL: it goes on, and its end says so.
ALTER TABLE attempts ADD COLUMN look_at BIGINT;
UPDATE attempts SET look_at = 0 WHERE ended_at IS NOT NULL;
DROP INDEX attempts_ended;
CREATE INDEX attempts_to_look_at ON attempts (look_at) WHERE look_at IS NOT NULL;

-- When to look whether it can be forgotten.
ALTER TABLE holders ADD COLUMN look_at BIGINT NOT NULL DEFAULT 0;
DROP INDEX holders_by_age;
CREATE INDEX holders_to_look_at ON holders (look_at);

-- Looked at in order of their claims; marked ones not at all.
DROP INDEX volumes_claimed;
CREATE INDEX volumes_claimed ON volumes (claimed_until)
    WHERE complete = FALSE AND claimed_until IS NOT NULL AND state NOT IN ('destroying', 'sweeping');
-- They are found by their attempt.
DROP INDEX volumes_of_attempts;
DROP INDEX containers_live;
