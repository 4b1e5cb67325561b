-- What consumers do with chunks. Plans are kept by long-lived connections and may have been made while the tables were
-- empty: the settings of the functions see to it that a table that has grown since is never read as a whole.

-- p_models: {model: [version for new jobs, others …]}
CREATE FUNCTION twodoor.may_run(p_status text, p_model text, p_version text, p_models jsonb) RETURNS boolean
LANGUAGE sql IMMUTABLE AS $$
    SELECT p_status IN ('cancelling', 'expiring', 'failing')
        OR COALESCE(p_models -> p_model ? p_version, p_models -> p_model ->> 0 IS NOT NULL)
$$;

CREATE FUNCTION twodoor.claim_chunk(p_consumer text, p_models jsonb, p_full text[], p_lease_s double precision)
RETURNS TABLE (chunk twodoor.chunks, job twodoor.jobs, weight double precision)
LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
DECLARE
    v_tenant record;
    v_turn   record;
    v_chunk  twodoor.chunks;
    v_job    twodoor.jobs;
BEGIN
    FOR v_tenant IN
        SELECT t.name, t.weight FROM twodoor.active_tenants a JOIN twodoor.tenants t ON t.name = a.name
        ORDER BY t.virtual_time, t.name
    LOOP
        FOR v_turn IN
            SELECT u.job_id FROM twodoor.turns u JOIN twodoor.jobs j ON j.id = u.job_id
            WHERE u.tenant = v_tenant.name AND u.job_id <> ALL (p_full)
                AND twodoor.may_run(j.status, j.model, j.model_version, p_models)
            ORDER BY u.virtual_time, u.job_id
        LOOP
            SELECT c.* INTO v_chunk FROM twodoor.chunks c
            WHERE c.job_id = v_turn.job_id AND NOT c.done
                AND (c.lease_until IS NULL OR c.lease_until <= clock_timestamp())
            ORDER BY c.number LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
            CONTINUE WHEN NOT FOUND;
            SELECT j.* INTO v_job FROM twodoor.jobs j WHERE j.id = v_turn.job_id;
            IF v_job.status = 'queued' THEN
                -- Another consumer may be pinning a version at this moment, or somebody ending the job: wait and look again.
                SELECT j.* INTO v_job FROM twodoor.jobs j WHERE j.id = v_turn.job_id FOR NO KEY UPDATE;
            END IF;
            CONTINUE WHEN NOT twodoor.may_run(v_job.status, v_job.model, v_job.model_version, p_models);
            IF v_job.status = 'queued' THEN
                UPDATE twodoor.jobs j
                SET status = 'running', started_at = clock_timestamp(), model_version = p_models -> j.model ->> 0
                WHERE j.id = v_turn.job_id
                RETURNING j.* INTO v_job;
            END IF;
            UPDATE twodoor.chunks c
            SET generation = c.generation + 1, token = gen_random_uuid(), consumer = p_consumer,
                lease_until = clock_timestamp() + make_interval(secs => p_lease_s)
            WHERE c.job_id = v_chunk.job_id AND c.number = v_chunk.number
            RETURNING c.* INTO v_chunk;
            IF v_chunk.generation = 1 THEN
                UPDATE twodoor.turns u
                SET virtual_time = u.virtual_time + v_chunk.row_count,
                    last_claimed = u.last_claimed OR v_chunk.number = v_job.chunk_count - 1
                WHERE u.job_id = v_chunk.job_id;
                -- Last, because all claims of a tenant meet at this row.
                UPDATE twodoor.tenants t SET virtual_time = t.virtual_time + v_chunk.row_count / t.weight
                WHERE t.name = v_tenant.name;
            END IF;
            RETURN QUERY SELECT v_chunk, v_job, v_tenant.weight;
            RETURN;
        END LOOP;
    END LOOP;
END $$;

-- One row for each claim that was named, and one with job_id NULL that stands for none.
CREATE FUNCTION twodoor.renew_leases(
    p_consumer text, p_epoch bigint, p_rows_in_flight integer, p_lease_s double precision,
    p_jobs text[], p_numbers integer[], p_generations integer[]
) RETURNS TABLE (job_id text, number integer, held boolean, status text, epoch bigint, paused boolean)
LANGUAGE plpgsql SET enable_seqscan = off AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO twodoor.consumers AS k (id, epoch, rows_in_flight, started_at, seen_at)
    VALUES (p_consumer, p_epoch, p_rows_in_flight, clock_timestamp(), clock_timestamp())
    ON CONFLICT (id) DO UPDATE
    SET epoch = excluded.epoch, rows_in_flight = excluded.rows_in_flight, seen_at = excluded.seen_at;
    UPDATE twodoor.chunks c SET lease_until = clock_timestamp() + make_interval(secs => p_lease_s)
    FROM unnest(p_jobs, p_numbers, p_generations) AS n (job_id, number, generation)
    WHERE c.job_id = n.job_id AND c.number = n.number AND c.generation = n.generation
        AND c.token IS NOT NULL AND NOT c.done;
    -- A claim that is done is no lost one: its consumer may not have heard of it yet.
    RETURN QUERY
    SELECT n.job_id, n.number, COALESCE(c.generation = n.generation AND c.token IS NOT NULL, false), j.status, k.epoch, k.paused
    FROM twodoor.control k
    CROSS JOIN (SELECT * FROM unnest(p_jobs, p_numbers, p_generations) UNION ALL VALUES (NULL::text, NULL::integer, NULL::integer))
        AS n (job_id, number, generation)
    LEFT JOIN twodoor.chunks c ON c.job_id = n.job_id AND c.number = n.number
    LEFT JOIN twodoor.jobs j ON j.id = n.job_id;
END $$;

CREATE FUNCTION twodoor.complete_chunk(
    p_job text, p_number integer, p_generation integer, p_token text,
    p_part_key text, p_succeeded integer, p_failed integer, p_result_bytes bigint, p_error_bytes bigint
) RETURNS boolean LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    UPDATE twodoor.chunks c
    SET done = true, lease_until = NULL, suspects = NULL, part_key = p_part_key, succeeded = p_succeeded,
        failed = p_failed, result_bytes = p_result_bytes, error_bytes = p_error_bytes
    WHERE c.job_id = p_job AND c.number = p_number AND c.generation = p_generation AND c.token::text = p_token AND NOT c.done;
    IF FOUND THEN
        RETURN true;
    END IF;
    -- A statement of its own: an earlier try of the same claim may have ended while this one waited for its row.
    RETURN EXISTS (SELECT FROM twodoor.chunks c WHERE c.job_id = p_job AND c.number = p_number AND c.done
                   AND c.generation = p_generation AND c.token::text = p_token AND c.part_key = p_part_key);
END $$;
