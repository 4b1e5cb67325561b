-- Intake. Each function is one whole transaction in one statement: a process that dies or is stopped in the middle of a
-- method never holds a lock. READ COMMITTED gives every statement inside a function a view of its own.

-- p_weight NULL: the tenant keeps the one it has.
-- outcome: accepted (also where this very job is in already), replayed, mismatch, quota or swept.
CREATE FUNCTION twodoor.accept_job(
    p_id text, p_tenant text, p_weight double precision, p_model text, p_truncate boolean, p_metadata json,
    p_input_key text, p_input_bytes bigint, p_has_lines boolean, p_rows bigint, p_completion_window_s integer,
    p_result_ttl_s integer, p_fingerprint bytea, p_uploaded boolean, p_idempotency_key text, p_max_queued_rows bigint,
    p_request_id text, p_source json,
    p_start_bytes bigint[], p_end_bytes bigint[], p_first_rows bigint[], p_first_lines bigint[], p_row_counts integer[],
    p_oversized boolean[]
) RETURNS TABLE (outcome text, job twodoor.jobs) LANGUAGE plpgsql AS $$
DECLARE
    v_job    twodoor.jobs;
    v_key    twodoor.idempotency;
    v_active boolean;
BEGIN
    -- Quota, keys and waking are decided for one submission of a tenant after the other. Not under its row's lock: the
    -- tenant's claims need that one, and many chunks take a while to insert.
    PERFORM pg_advisory_xact_lock(hashtextextended('twodoor.accept_job ' || p_tenant, 0));
    INSERT INTO twodoor.tenants (name, weight) VALUES (p_tenant, COALESCE(p_weight, 1)) ON CONFLICT (name) DO NOTHING;

    SELECT j.* INTO v_job FROM twodoor.jobs j WHERE j.id = p_id;
    IF FOUND THEN
        RETURN QUERY SELECT 'accepted', v_job;
        RETURN;
    END IF;
    IF p_idempotency_key IS NOT NULL THEN
        SELECT k.* INTO v_key FROM twodoor.idempotency k WHERE k.tenant = p_tenant AND k.key = p_idempotency_key;
        IF FOUND THEN
            SELECT j.* INTO v_job FROM twodoor.jobs j WHERE j.id = v_key.job_id AND j.deleted_at IS NULL;
            RETURN QUERY SELECT CASE WHEN FOUND AND v_key.fingerprint = p_fingerprint THEN 'replayed' ELSE 'mismatch' END, v_job;
            RETURN;
        END IF;
    END IF;
    IF p_max_queued_rows IS NOT NULL AND twodoor.queued_rows(p_tenant) + p_rows > p_max_queued_rows THEN
        RETURN QUERY SELECT 'quota', v_job;
        RETURN;
    END IF;
    IF p_uploaded THEN
        DELETE FROM twodoor.uploads u WHERE u.job_id = p_id AND u.tenant = p_tenant;
        IF NOT FOUND THEN
            RETURN QUERY SELECT 'swept', v_job;
            RETURN;
        END IF;
    END IF;

    v_active := EXISTS (SELECT FROM twodoor.turns u WHERE u.tenant = p_tenant);
    INSERT INTO twodoor.jobs (id, tenant, model, truncate, metadata, input_key, input_bytes, has_lines, rows_total, chunk_count,
                              result_ttl_s, request_id, source, created_at, deadline_at)
    VALUES (p_id, p_tenant, p_model, p_truncate, p_metadata, p_input_key, p_input_bytes, p_has_lines, p_rows,
            cardinality(p_row_counts), p_result_ttl_s, p_request_id, p_source, now(),
            now() + make_interval(secs => p_completion_window_s))
    RETURNING * INTO v_job;
    INSERT INTO twodoor.chunks (job_id, number, start_byte, end_byte, first_row, first_line, row_count, oversized)
    SELECT p_id, c.ordinality - 1, c.start_byte, c.end_byte, c.first_row, c.first_line, c.row_count, c.oversized
    FROM unnest(p_start_bytes, p_end_bytes, p_first_rows, p_first_lines, p_row_counts, p_oversized) WITH ORDINALITY
        AS c (start_byte, end_byte, first_row, first_line, row_count, oversized, ordinality);
    INSERT INTO twodoor.turns (job_id, tenant, virtual_time)
    SELECT p_id, p_tenant, COALESCE(min(u.virtual_time), 0) FROM twodoor.turns u WHERE u.tenant = p_tenant;
    IF p_idempotency_key IS NOT NULL THEN
        INSERT INTO twodoor.idempotency VALUES (p_tenant, p_idempotency_key, p_id, p_fingerprint, now());
    END IF;
    IF p_source IS NOT NULL THEN
        INSERT INTO twodoor.notifications (kind, job_id) VALUES ('accepted', p_id);
    END IF;
    UPDATE twodoor.tenants t SET weight = p_weight WHERE t.name = p_tenant AND t.weight <> p_weight;
    IF NOT v_active THEN
        -- Where nobody is active all start level, so that nobody pays for what it used while it was alone.
        UPDATE twodoor.tenants t SET virtual_time = greatest(t.virtual_time, COALESCE(
            (SELECT min(o.virtual_time) FROM twodoor.active_tenants a JOIN twodoor.tenants o ON o.name = a.name
             WHERE a.name <> p_tenant),
            (SELECT max(o.virtual_time) FROM twodoor.tenants o)))
        WHERE t.name = p_tenant;
    END IF;
    RETURN QUERY SELECT 'accepted', v_job;
END $$;

CREATE FUNCTION twodoor.queued_rows(p_tenant text) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT COALESCE(sum(c.row_count), 0)::bigint
    FROM twodoor.turns u JOIN twodoor.chunks c ON c.job_id = u.job_id
    WHERE u.tenant = p_tenant AND NOT c.done
$$;

-- Move a job to a state if it is in one that allows it; no row for an unknown one. p_tenant NULL: any tenant's.
CREATE FUNCTION twodoor.move_job(p_tenant text, p_id text, p_from text[], p_to text, p_code text, p_message text)
RETURNS TABLE (moved boolean, job twodoor.jobs) LANGUAGE plpgsql AS $$
DECLARE
    v_job   twodoor.jobs;
    v_moved boolean;
BEGIN
    UPDATE twodoor.jobs j SET status = p_to, error_code = p_code, error_message = p_message
    WHERE j.id = p_id AND (p_tenant IS NULL OR j.tenant = p_tenant) AND j.deleted_at IS NULL AND j.status = ANY (p_from)
    RETURNING j.* INTO v_job;
    v_moved := FOUND;
    IF NOT v_moved THEN
        -- A statement of its own: it sees what the one that was waited for has done.
        SELECT j.* INTO v_job FROM twodoor.jobs j
        WHERE j.id = p_id AND (p_tenant IS NULL OR j.tenant = p_tenant) AND j.deleted_at IS NULL;
        IF NOT FOUND THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY SELECT v_moved, v_job;
END $$;

-- Remove what is kept of an ended job, whose row the caller has locked, but for the memory of its id.
CREATE FUNCTION twodoor.bury_job(p_id text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM twodoor.chunks c WHERE c.job_id = p_id;
    INSERT INTO twodoor.garbage (prefix) VALUES ('jobs/' || p_id || '/') ON CONFLICT (prefix) DO NOTHING;
    UPDATE twodoor.jobs j SET deleted_at = now() WHERE j.id = p_id;
END $$;

-- unknown, open or deleted
CREATE FUNCTION twodoor.delete_job(p_tenant text, p_id text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    v_ended boolean;
BEGIN
    SELECT j.finished_at IS NOT NULL INTO v_ended FROM twodoor.jobs j
    WHERE j.id = p_id AND j.tenant = p_tenant AND j.deleted_at IS NULL FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'unknown';
    ELSIF NOT v_ended THEN
        RETURN 'open';
    END IF;
    PERFORM twodoor.bury_job(p_id);
    RETURN 'deleted';
END $$;

CREATE FUNCTION twodoor.take_expired_uploads(p_limit integer) RETURNS SETOF text LANGUAGE sql AS $$
    WITH taken AS (
        DELETE FROM twodoor.uploads u WHERE u.job_id = ANY (ARRAY(
            SELECT e.job_id FROM twodoor.uploads e WHERE e.expires_at <= clock_timestamp()
            ORDER BY e.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING u.job_id
    ), thrown AS (
        INSERT INTO twodoor.garbage (prefix) SELECT 'jobs/' || t.job_id || '/' FROM taken t ON CONFLICT (prefix) DO NOTHING
    )
    SELECT job_id FROM taken
$$;
