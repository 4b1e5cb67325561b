-- What nobody else owns.

-- A chunk that is done never opens again, so what this shows stays true.
CREATE VIEW twodoor.closable AS
SELECT u.job_id FROM twodoor.turns u
WHERE u.last_claimed AND NOT EXISTS (SELECT FROM twodoor.chunks c WHERE c.job_id = u.job_id AND NOT c.done);

CREATE VIEW twodoor.overdue AS
SELECT j.id AS job_id FROM twodoor.jobs j
WHERE j.status IN ('queued', 'running') AND j.deadline_at <= clock_timestamp()
    AND EXISTS (SELECT FROM twodoor.chunks c WHERE c.job_id = j.id AND NOT c.done);

-- p_closes_as: {state: the state it closes as}
CREATE FUNCTION twodoor.close_jobs(p_limit integer, p_closes_as jsonb) RETURNS SETOF twodoor.jobs
LANGUAGE plpgsql SET enable_seqscan = off AS $$
DECLARE
    v_id  text;
    v_job twodoor.jobs;
BEGIN
    FOR v_id IN
        SELECT w.job_id FROM twodoor.closable w LIMIT p_limit
    LOOP
        PERFORM FROM twodoor.jobs j WHERE j.id = v_id AND p_closes_as ? j.status FOR UPDATE SKIP LOCKED;
        CONTINUE WHEN NOT FOUND;
        UPDATE twodoor.jobs j
        SET status = p_closes_as ->> j.status, finished_at = clock_timestamp(),
            expires_at = clock_timestamp() + make_interval(secs => j.result_ttl_s),
            rows_succeeded = s.succeeded, rows_failed = s.failed
        FROM (SELECT sum(c.succeeded) AS succeeded, sum(c.failed) AS failed FROM twodoor.chunks c WHERE c.job_id = v_id) s
        WHERE j.id = v_id
        RETURNING j.* INTO v_job;
        DELETE FROM twodoor.turns u WHERE u.job_id = v_id;
        IF v_job.source IS NOT NULL THEN
            INSERT INTO twodoor.notifications (kind, job_id) VALUES ('ended', v_id);
        END IF;
        RETURN NEXT v_job;
    END LOOP;
END $$;

CREATE FUNCTION twodoor.retire_jobs(p_limit integer) RETURNS SETOF twodoor.jobs LANGUAGE plpgsql AS $$
DECLARE
    v_job twodoor.jobs;
BEGIN
    FOR v_job IN
        SELECT j.* FROM twodoor.jobs j WHERE j.expires_at <= now() AND j.deleted_at IS NULL
        ORDER BY j.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED
    LOOP
        PERFORM twodoor.bury_job(v_job.id);
        RETURN NEXT v_job;
    END LOOP;
END $$;

-- Returns how many removed jobs and keys were purged. An event that was not told yet still needs its job.
CREATE FUNCTION twodoor.forget(p_limit integer, p_ttl_s double precision) RETURNS integer LANGUAGE sql AS $$
    WITH keys AS (
        DELETE FROM twodoor.idempotency k WHERE k.ctid = ANY (ARRAY(
            SELECT o.ctid FROM twodoor.idempotency o WHERE o.created_at <= now() - make_interval(secs => p_ttl_s)
            ORDER BY o.created_at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING 1
    ), gone AS (
        DELETE FROM twodoor.jobs j WHERE j.id = ANY (ARRAY(
            SELECT o.id FROM twodoor.jobs o WHERE o.deleted_at <= now() - make_interval(secs => p_ttl_s)
                AND NOT EXISTS (SELECT FROM twodoor.notifications n WHERE n.job_id = o.id)
            ORDER BY o.deleted_at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING 1
    ), silent AS (
        DELETE FROM twodoor.consumers c WHERE c.seen_at <= now() - make_interval(secs => p_ttl_s)
    )
    SELECT ((SELECT count(*) FROM keys) + (SELECT count(*) FROM gone))::integer
$$;

-- How much waits now, of each kind; what an autoscaler counts.
CREATE VIEW twodoor.duties (duty, waiting) AS
SELECT 'chunk', (SELECT COALESCE(sum(o.chunks), 0)::bigint FROM twodoor.turns u CROSS JOIN LATERAL (
                     SELECT count(*) AS chunks FROM twodoor.chunks c
                     WHERE c.job_id = u.job_id AND NOT c.done
                         AND (c.lease_until IS NULL OR c.lease_until <= clock_timestamp())) o)
UNION ALL SELECT 'close', (SELECT count(*) FROM twodoor.closable)
UNION ALL SELECT 'expire', (SELECT count(*) FROM twodoor.overdue)
UNION ALL SELECT 'retire', (SELECT count(*) FROM twodoor.jobs j WHERE j.expires_at <= now() AND j.deleted_at IS NULL)
UNION ALL SELECT 'upload', (SELECT count(*) FROM twodoor.uploads u WHERE u.expires_at <= clock_timestamp())
UNION ALL SELECT 'garbage', (SELECT count(*) FROM twodoor.garbage g
                             WHERE g.lease_until IS NULL OR g.lease_until <= clock_timestamp())
UNION ALL SELECT 'notification', (SELECT count(*) FROM twodoor.notifications n
                                  WHERE n.lease_until IS NULL OR n.lease_until <= clock_timestamp());
