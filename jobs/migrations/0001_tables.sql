-- The ledger's tables. Columns that change with every claim or renewal (generation, token, lease) stand in no index,
-- so such an update stays on its page; the indexes hold only what is still to do.

CREATE TABLE twodoor.tenants (
    name         text COLLATE "C" PRIMARY KEY,
    weight       double precision NOT NULL CHECK (weight > 0),
    virtual_time double precision NOT NULL DEFAULT 0
) WITH (fillfactor = 50);

CREATE TABLE twodoor.jobs (
    id              text COLLATE "C" PRIMARY KEY,
    tenant          text COLLATE "C" NOT NULL REFERENCES twodoor.tenants (name),
    status          text NOT NULL DEFAULT 'queued' CHECK (status IN (
        'queued', 'running', 'cancelling', 'expiring', 'failing', 'completed', 'cancelled', 'expired', 'failed')),
    model           text COLLATE "C" NOT NULL,
    model_version   text COLLATE "C",
    truncate        boolean NOT NULL,
    -- json and not jsonb: it comes back as it was sent, key order and numbers too.
    metadata        json NOT NULL,
    input_key       text NOT NULL,
    input_bytes     bigint NOT NULL,
    has_lines       boolean NOT NULL,
    rows_total      bigint NOT NULL,
    chunk_count     integer NOT NULL CHECK (chunk_count > 0),
    result_ttl_s    integer NOT NULL,
    request_id      text,
    source          json,
    created_at      timestamptz NOT NULL,
    started_at      timestamptz,
    finished_at     timestamptz,
    deadline_at     timestamptz NOT NULL,
    expires_at      timestamptz,
    -- Sums over the chunks, frozen when the job closes; before that they are added up at each question.
    rows_succeeded  bigint,
    rows_failed     bigint,
    error_code      text,
    error_message   text,
    -- A removed job is remembered for a while: its id still works as a cursor, its Idempotency-Key makes no second job.
    deleted_at      timestamptz,
    CHECK ((finished_at IS NULL) = (rows_succeeded IS NULL) AND (finished_at IS NULL) = (rows_failed IS NULL))
) WITH (fillfactor = 80);
CREATE INDEX jobs_listed ON twodoor.jobs (tenant, status, created_at DESC, id DESC) WHERE deleted_at IS NULL;
CREATE INDEX jobs_wanting ON twodoor.jobs (model, model_version) WHERE status IN ('queued', 'running');
CREATE INDEX jobs_deadline ON twodoor.jobs (deadline_at) WHERE status IN ('queued', 'running');
CREATE INDEX jobs_retire ON twodoor.jobs (expires_at) WHERE expires_at IS NOT NULL AND deleted_at IS NULL;
CREATE INDEX jobs_forget ON twodoor.jobs (deleted_at) WHERE deleted_at IS NOT NULL;

-- One row for each job that has not ended: whose turn it is. Narrow, because each first claim of a chunk rewrites it.
CREATE TABLE twodoor.turns (
    job_id       text COLLATE "C" PRIMARY KEY REFERENCES twodoor.jobs (id),
    tenant       text COLLATE "C" NOT NULL,
    virtual_time double precision NOT NULL,
    -- Only a job whose last chunk was claimed at least once can be without an open chunk: the few that are looked at.
    last_claimed boolean NOT NULL DEFAULT false
) WITH (fillfactor = 50);
CREATE INDEX turns_next ON twodoor.turns (tenant, virtual_time, job_id);
CREATE INDEX turns_last_claimed ON twodoor.turns (job_id) WHERE last_claimed;

CREATE TABLE twodoor.chunks (
    job_id       text COLLATE "C" NOT NULL REFERENCES twodoor.jobs (id),
    number       integer NOT NULL,
    start_byte   bigint NOT NULL,
    end_byte     bigint NOT NULL,
    first_row    bigint NOT NULL,
    first_line   bigint NOT NULL,
    row_count    integer NOT NULL CHECK (row_count > 0),
    oversized    boolean NOT NULL,
    done         boolean NOT NULL DEFAULT false,
    generation   integer NOT NULL DEFAULT 0,
    -- The current claim: unset before the first one and after a release, kept when done so that the same claim may ask again.
    token        uuid,
    consumer     text,
    lease_until  timestamptz,
    suspects     json,
    part_key     text,
    succeeded    integer,
    failed       integer,
    result_bytes bigint,
    error_bytes  bigint,
    PRIMARY KEY (job_id, number),
    CHECK (NOT done OR (part_key IS NOT NULL AND succeeded + failed = row_count
                        AND result_bytes IS NOT NULL AND error_bytes IS NOT NULL))
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.02);
CREATE INDEX chunks_open ON twodoor.chunks (job_id, number) WHERE NOT done;

CREATE TABLE twodoor.uploads (
    job_id     text COLLATE "C" PRIMARY KEY,
    tenant     text COLLATE "C" NOT NULL,
    key        text NOT NULL,
    expires_at timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE twodoor.idempotency (
    tenant      text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    job_id      text COLLATE "C" NOT NULL,
    fingerprint bytea NOT NULL,
    created_at  timestamptz NOT NULL,
    PRIMARY KEY (tenant, key)
);
CREATE INDEX idempotency_forget ON twodoor.idempotency (created_at);

CREATE TABLE twodoor.notifications (
    id          bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text NOT NULL CHECK (kind IN ('accepted', 'ended')),
    job_id      text COLLATE "C" NOT NULL REFERENCES twodoor.jobs (id),
    leased_by   text,
    lease_until timestamptz
) WITH (fillfactor = 70);
CREATE INDEX notifications_of_job ON twodoor.notifications (job_id);

-- Prefixes of objects that nothing refers to any more.
CREATE TABLE twodoor.garbage (
    prefix      text COLLATE "C" PRIMARY KEY,
    created_at  timestamptz NOT NULL DEFAULT now(),
    leased_by   text,
    lease_until timestamptz
) WITH (fillfactor = 70);
CREATE INDEX garbage_oldest ON twodoor.garbage (created_at, prefix);

CREATE TABLE twodoor.periodic (
    name        text PRIMARY KEY,
    leased_by   text,
    lease_until timestamptz,
    ended_at    timestamptz
);

CREATE TABLE twodoor.consumers (
    id             text COLLATE "C" PRIMARY KEY,
    epoch          bigint NOT NULL,
    rows_in_flight integer NOT NULL,
    started_at     timestamptz NOT NULL,
    seen_at        timestamptz NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE twodoor.control (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    epoch  bigint NOT NULL,
    paused boolean NOT NULL
);
INSERT INTO twodoor.control (epoch, paused) VALUES (0, false);

-- Tenants with a job that has not ended, by hopping from one to the next through the index: costs by active tenants.
CREATE VIEW twodoor.active_tenants AS
WITH RECURSIVE hop (name) AS (
    (SELECT tenant FROM twodoor.turns ORDER BY tenant LIMIT 1)
    UNION ALL
    SELECT (SELECT u.tenant FROM twodoor.turns u WHERE u.tenant > hop.name ORDER BY u.tenant LIMIT 1)
    FROM hop WHERE hop.name IS NOT NULL
)
SELECT name FROM hop WHERE name IS NOT NULL;
