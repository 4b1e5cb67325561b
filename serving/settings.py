"""Every setting of every part: frozen, typed, one environment variable each, its unit in its name.

Classes only. Instances are made in a process's ``__main__`` and passed in. ``docs/settings.md`` is generated from
the descriptions here (``python -m serving.settings_doc``).
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from serving.errors import ConfigError

Port = Annotated[int, Field(ge=1, le=65535)]
S = TypeVar("S", bound="Settings")


class Settings(BaseSettings):
    """Base of all settings: frozen, read from ``TWODOOR_<PART>_<NAME>``; an empty variable counts as not set."""

    model_config = SettingsConfigDict(frozen=True, env_ignore_empty=True, extra="forbid")


class ModelSettings(Settings):
    """Where the model repository is."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_MODELS_")

    repository: Path = Field(
        Path("model_repository"), description="Folder of the Triton model repository; the doors read tokenizers there."
    )
    default: str = Field("sentiment_model", min_length=1, description="Model of a call that names none.")


class TritonSettings(Settings):
    """How a door reaches Triton."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_TRITON_")

    grpc_address: str = Field("127.0.0.1:8001", min_length=3, description="host:port of Triton's gRPC endpoint.")
    max_message_bytes: int = Field(64 * 2**20, ge=2**20, description="Largest gRPC message in either direction.")
    keepalive_time_ms: int = Field(
        30_000,
        ge=10_000,
        description="Interval of HTTP/2 pings while calls are in flight; Triton refuses more than one in 10 s.",
    )
    keepalive_timeout_ms: int = Field(
        10_000, ge=1_000, description="How long a ping may stay unanswered before the connection is given up."
    )
    control_timeout_s: float = Field(5.0, gt=0, description="Deadline of a control call (ready, config, index).")
    poll_interval_s: float = Field(1.0, gt=0, description="How often a door asks Triton which models are ready.")
    abandon_grace_s: float = Field(
        30.0,
        gt=0,
        description="How long a call whose caller is gone may stay open, where the server version does not survive a cancelled call.",
    )


class GatewaySettings(Settings):
    """The interactive door."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_GATEWAY_")

    host: str = Field("127.0.0.1", min_length=1, description="Address to bind. Without keys only loopback is accepted.")
    port: Port = Field(8080, description="Port of the HTTP interface.")
    max_body_bytes: int = Field(
        2 * 2**20, ge=1024, description="Largest request body, counted after decoding, while it is read."
    )
    max_rows: int = Field(256, ge=1, description="Most texts in one call.")
    max_text_chars: int = Field(1_000_000, ge=1, description="Most characters in one text of a call.")
    max_admitted_tokens: int = Field(
        65_536, ge=512, description="Bound of all tokens admitted and not yet answered; over it a call gets 503."
    )
    max_admitted_rows: int = Field(
        1_024,
        ge=1,
        description="Bound of all rows admitted and not yet answered; over it a call gets 503. At the measured rate the last one waits about a quarter of the default deadline.",
    )
    max_connections: int = Field(
        12_288,
        ge=1,
        description="Most open connections. Over it the one that rests longest is closed, or, where none rests, the new one is answered 503. The process raises its own limit of open files to what this needs; where the hard limit is lower, that bounds it.",
    )
    max_in_flight: int = Field(
        0,
        ge=0,
        description="Most requests to one model at one time; while so many are on their way rows wait in line, inside the bound of rows, and are joined. 0 = the model's instances and one more.",
    )
    default_timeout_ms: int = Field(10_000, ge=1, description="Deadline of a call that sets none.")
    max_timeout_ms: int = Field(60_000, ge=1, description="Longest deadline a caller may ask for with X-Timeout-Ms.")
    max_request_rows: int = Field(
        8,
        ge=1,
        description="Most rows of one call or of concurrent ones that go to Triton in one request, so that nobody is kept behind many.",
    )
    max_request_tokens: int = Field(
        512,
        ge=16,
        description="Most padded tokens in one request to Triton (a longer text goes alone); more pays on a GPU only.",
    )
    request_overhead_tokens: int = Field(
        20,
        ge=0,
        description="What a request costs besides its rows, in tokens: rows of unlike lengths go together only where padding costs less.",
    )
    max_buffered_bytes: int = Field(
        64 * 2**20,
        ge=2**20,
        description="Bound of all bodies of /predict held at one time, and once more of all JSON bodies of jobs; over it a call gets 503.",
    )
    max_head_bytes: int = Field(
        96 * 2**10, ge=8 * 2**10, description="Most bytes of a request's head (line and headers, so also of ?text=)."
    )
    head_timeout_s: float = Field(20.0, gt=0, description="How long a connection may take to send a request's head.")
    body_timeout_s: float = Field(
        30.0, gt=0, description="How long a caller may take to send its body, or to go on taking its answer."
    )
    min_transfer_bytes_per_s: int = Field(
        512,
        ge=1,
        description="Slowest pace, on the average, at which a job's body may be sent and an answer that waits may be taken.",
    )
    keep_alive_timeout_s: float = Field(75.0, gt=0, description="How long an idle connection stays open.")
    offload_bytes: int = Field(
        16_384,
        ge=256,
        le=65_536,
        description="Work on more than this many bytes (JSON, tokenizing, rendering) leaves the event loop's thread.",
    )
    shutdown_timeout_s: float = Field(10.0, gt=0, description="How long calls in flight may take after SIGTERM.")
    demand_window_s: float = Field(
        60.0,
        gt=0,
        description="How long rows that were refused with 503 count in twodoor_demand_rows; at least two scrapes of the metrics.",
    )
    keys_file: Path | None = Field(
        None,
        description="File of API keys, one JSON object a line with sha256, tenant, weight, rate_rows_per_s, max_queued_rows, admin; read again on SIGHUP. None = open, one tenant.",
    )
    limits_storage_url: str = Field(
        "",
        description="Where rate limits count: empty = this process's memory, or async+redis://host:port for all gateways together.",
    )
    max_job_body_bytes: int = Field(
        5 * 2**30, ge=1024, description="Largest JSONL body of a job, counted after decoding, while it is streamed."
    )
    max_job_json_bytes: int = Field(
        16 * 2**20, ge=1024, description="Largest JSON body of a job with its inputs inside; it is read into memory."
    )
    max_uploads: int = Field(
        16, ge=1, description="Most job bodies that are received at one time; over it a call gets 503."
    )
    upload_idle_timeout_s: float = Field(30.0, gt=0, description="How long a job's body may pause while it is sent.")
    max_wait_s: int = Field(60, ge=0, description="Longest wait a caller may ask for with Prefer: wait.")
    stream_max_connections: int = Field(
        1_000,
        ge=1,
        description="Most WebSockets of /v1/stream that are open at one time; over it a handshake gets 503.",
    )
    stream_max_message_bytes: int = Field(
        2**20, ge=1024, description="Largest message of /v1/stream; a larger one closes its connection with 1009."
    )
    stream_max_unanswered: int = Field(
        64,
        ge=1,
        description="Most messages of one WebSocket that are read and not yet answered; then reading stops until one is.",
    )
    stream_idle_timeout_s: float = Field(
        300.0, gt=0, description="A WebSocket without a message for this long, and with none unanswered, is closed."
    )
    stream_ping_interval_s: float = Field(20.0, gt=0, description="How often an open WebSocket is pinged.")
    stream_ping_timeout_s: float = Field(
        20.0, gt=0, description="A WebSocket that sends nothing for this long after a ping is closed with 1011."
    )
    stream_origins: str = Field(
        "",
        description="Comma-separated origins (https://host) whose pages may open a WebSocket. Only browsers send an Origin; a program sends none and is not asked.",
    )

    @model_validator(mode="after")
    def _loopback_only_without_keys(self) -> Self:
        loopback = self.host in ("127.0.0.1", "::1", "localhost")
        if not loopback and self.keys_file is None and not self.allow_open:
            raise ValueError(
                f"TWODOOR_GATEWAY_HOST={self.host} is not loopback and there are no keys: anybody could call. "
                "Set TWODOOR_GATEWAY_KEYS_FILE, or put an authenticating proxy before it and set "
                "TWODOOR_GATEWAY_ALLOW_OPEN=true"
            )
        return self

    allow_open: bool = Field(
        False,
        description="Accept a host that is not loopback although there is no keys file (behind an authenticating proxy, or in a container network).",
    )


class KafkaSettings(Settings):
    """How to reach Kafka, and the topics."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_KAFKA_")

    bootstrap_servers: str = Field("127.0.0.1:9092", min_length=3, description="Comma-separated host:port list.")
    requests_topic: str = Field("twodoor.requests", min_length=1, description="Topic of records to work on.")
    results_topic: str = Field("twodoor.results", min_length=1, description="Topic of results.")
    dlq_topic: str = Field("twodoor.requests.dlq", min_length=1, description="Topic of unreadable records.")
    jobs_topic: str = Field("twodoor.jobs", min_length=1, description="Topic of job submissions.")
    jobs_events_topic: str = Field(
        "twodoor.jobs.events", min_length=1, description="Topic of acceptances and ends of jobs that came by topic."
    )
    jobs_dlq_topic: str = Field("twodoor.jobs.dlq", min_length=1, description="Topic of refused job submissions.")
    partitions: int = Field(
        12, ge=1, description="Partitions of the request, result, job and event topics where Twodoor creates them."
    )
    max_message_bytes: int = Field(
        1_048_576, ge=1024, description="max.message.bytes of the topics Twodoor creates, and the bound of one result."
    )


class ConsumerSettings(Settings):
    """The bulk door."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_CONSUMER_")

    host: str = Field("127.0.0.1", min_length=1, description="Address of the health and metrics endpoint.")
    port: Port = Field(8083, description="Port of the health and metrics endpoint.")
    group_id: str = Field(
        "twodoor", min_length=1, description="Kafka consumer group; also the first part of each transactional id."
    )
    max_microbatch_rows: int = Field(32, ge=1, description="Most rows in one micro-batch.")
    max_microbatch_tokens: int | None = Field(
        None,
        ge=512,
        description="Most padded tokens in one micro-batch; a single row may have more. Not set = 1,024 on a CPU, whose caches hold little more, and 4,096 on a GPU.",
    )
    max_in_flight: int = Field(
        0,
        ge=0,
        description="Most micro-batches of one model at Triton at one time; 0 = its bulk instances and one more, which keeps them busy.",
    )
    bulk_batch_ms: float | None = Field(
        None,
        ge=0,
        description="Longest micro-batch in ms, by the cost of each shape as measured at the model's first rows; 0 = no bound. Not set = what the model's config says (`bulk_batch_ms`) where nothing takes the processor away from a running one: on a GPU, and where a model serves both lanes itself.",
    )
    window_records: int = Field(
        512,
        ge=1,
        description="Most records of one partition that are read and not yet committed; a record of many inputs counts as that many.",
    )
    window_bytes: int = Field(
        16 * 2**20, ge=2**20, description="Most bytes of one partition's records that are read and not yet committed."
    )
    max_rows_per_record: int = Field(1_024, ge=1, description="Most inputs in one record.")
    max_text_chars: int = Field(
        1_000_000,
        ge=1,
        description="Most characters in one text; keep it equal to TWODOOR_GATEWAY_MAX_TEXT_CHARS, so that both doors give the same answer.",
    )
    offload_bytes: int = Field(
        16_384,
        ge=256,
        le=65_536,
        description="Work on more than this many bytes (JSON, protobuf, rendering) leaves the event loop's thread.",
    )
    transaction_records: int = Field(256, ge=1, description="Most records whose results go into one transaction.")
    commit_interval_ms: int = Field(
        1_000,
        ge=1,
        description="Longest time a finished record waits for its transaction while others of its partition are worked on.",
    )
    transaction_timeout_ms: int = Field(
        60_000, ge=1_000, description="After this time the broker aborts a transaction whose owner is silent."
    )
    kafka_timeout_s: float = Field(10.0, gt=0, description="Deadline of one exchange with Kafka.")
    kafka_check_interval_s: float = Field(
        2.0, gt=0, description="How often Kafka is asked for its metadata: readiness, lag and topic limits."
    )
    max_partition_fetch_bytes: int = Field(
        4 * 2**20,
        ge=4096,
        description="Most bytes fetched of one partition at once; must be over the topic's max.message.bytes.",
    )
    session_timeout_ms: int = Field(10_000, ge=1_000, description="Kafka's session.timeout.ms.")
    max_poll_interval_ms: int = Field(
        300_000,
        ge=1_000,
        description="Kafka's max.poll.interval.ms; a consumer that polls less often leaves its group.",
    )
    model_timeout_s: float = Field(60.0, gt=0, description="Deadline of one micro-batch at Triton.")
    retry_backoff_max_s: float = Field(5.0, gt=0, description="Longest pause between two tries while a server is away.")
    drain_timeout_s: float = Field(
        10.0, gt=0, description="How long running micro-batches may take after SIGTERM or a revoked partition."
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="With lag, a ready model and no progress for this long, /healthz fails."
    )
    max_chunks: int = Field(
        16, ge=1, description="Most chunks of jobs that are claimed at one time; of one job about four."
    )
    claim_interval_ms: int = Field(
        200, ge=10, description="How often the ledger is asked for a chunk while there is room and none was found."
    )
    lease_s: float = Field(
        15.0, gt=1, description="A chunk whose consumer gives no sign of life for this long is given to another one."
    )
    lease_renewal_s: float = Field(
        1.0, gt=0, description="How often leases are renewed; a cancelled job is noticed within this time."
    )
    duty_interval_s: float = Field(1.0, gt=0, description="How often the housekeeper looks for duties.")
    jobs_tenant: str = Field(
        "default",
        min_length=1,
        max_length=64,
        description="Tenant of the jobs that come by topic, and of imports/<tenant>/.",
    )
    row_deaths: int = Field(
        3, ge=1, description="Deaths of the model's process under one row alone before it is condemned as row_crashed."
    )
    nice: int = Field(
        10, ge=0, le=19, description="OS priority the process gives itself, so that the interactive door goes first."
    )


class JobsSettings(Settings):
    """Where jobs are kept, and their bounds. Both doors and the housekeeper read the same."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_JOBS_")

    database_url: SecretStr = Field(
        SecretStr(""), description="postgresql:// URL of the ledger; empty = no jobs. May be PgBouncer's."
    )
    database_timeout_s: float = Field(5.0, gt=0, description="Deadline of one exchange with the ledger.")
    database_connections: int = Field(4, ge=1, description="Most connections of one process to the ledger.")
    objects_url: str = Field(
        "", description="Where inputs and results lie: file:///folder, s3://bucket/prefix, gs://… or az://…."
    )
    objects_endpoint: str = Field(
        "",
        description="Endpoint of an S3-compatible store that is not AWS; its keys are AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
    )
    objects_region: str = Field("us-east-1", min_length=1, description="Region of the S3 bucket.")
    objects_allow_http: bool = Field(False, description="Speak plain HTTP to the object store's endpoint.")
    objects_timeout_s: float = Field(
        30.0, gt=0, description="Deadline of one exchange with the object store, and of each part of a long one."
    )
    chunk_rows: int = Field(
        512,
        ge=1,
        description="Most rows in one chunk, the unit of claiming: seconds of work, so that small jobs get their turn.",
    )
    chunk_bytes: int = Field(
        1 * 2**20, ge=1024, description="Most bytes of input in one chunk; a single row may have more."
    )
    max_row_bytes: int = Field(
        1 * 2**20,
        ge=1024,
        description="Most bytes in one row of a job; a larger one is never read and gets row_too_large.",
    )
    max_rows: int = Field(50_000_000, ge=1, description="Most rows in one job.")
    upload_ttl_s: float = Field(
        60.0, gt=0, description="An upload whose process gives no sign of life for this long is swept."
    )
    completion_window_s: int = Field(86_400, ge=1, description="Completion window of a job that sets none.")
    max_completion_window_s: int = Field(7 * 86_400, ge=1, description="Longest completion window a job may ask for.")
    result_ttl_s: int = Field(
        7 * 86_400, ge=1, description="How long results are kept after the job's end where it does not say."
    )
    max_result_ttl_s: int = Field(30 * 86_400, ge=1, description="Longest result_ttl_s a job may ask for.")
    idempotency_ttl_s: int = Field(
        86_400, ge=86_400, description="How long an Idempotency-Key and a deleted job's id are remembered."
    )
    consumer_ttl_s: float = Field(
        10.0,
        gt=0,
        description="A consumer that gave no sign of life for this long counts as gone (bulk pause, status).",
    )
    orphan_grace_s: float = Field(
        3_600.0, gt=0, description="An object that no job refers to is swept when it is older than this."
    )
    sweep_interval_s: float = Field(3_600.0, gt=0, description="How often all objects are compared with the ledger.")
    model_gone_s: float = Field(
        60.0, gt=0, description="A job whose pinned model version was missing this long, while Triton answers, fails."
    )

    @property
    def enabled(self) -> bool:
        """Whether this installation keeps jobs."""
        return bool(self.database_url.get_secret_value())

    @model_validator(mode="after")
    def _objects_with_database(self) -> Self:
        if self.enabled and not self.objects_url:
            raise ValueError("TWODOOR_JOBS_DATABASE_URL is set, so TWODOOR_JOBS_OBJECTS_URL has to be set too")
        return self


class StackSettings(Settings):
    """The local stack: ports on loopback and limits of the supervisor. Its state folder is ``TWODOOR_HOME``."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_STACK_", populate_by_name=True)

    home: Path = Field(
        Path(".twodoor"), validation_alias="TWODOOR_HOME", description="State folder of the local stack."
    )
    triton_http_port: Port = Field(8000, description="Triton's HTTP port.")
    triton_grpc_port: Port = Field(8001, description="Triton's gRPC port.")
    triton_metrics_port: Port = Field(8002, description="Triton's metrics port.")
    kafka_port: Port = Field(9092, description="Kafka's port.")
    kafka_controller_port: Port = Field(9093, description="Port of Kafka's controller listener.")
    postgres_port: Port = Field(5433, description="Port of the local PostgreSQL.")
    kafka_heap_mb: int = Field(512, ge=256, description="Heap of the local broker.")
    consumers: int = Field(1, ge=0, le=16, description="How many consumers `up` starts.")
    start_timeout_s: float = Field(120.0, gt=0, description="How long a service may take until it is ready.")
    stop_timeout_s: float = Field(
        18.0, ge=3, description="How long the whole stack may take to stop before what is left is killed."
    )
    restart_backoff_max_s: float = Field(
        10.0, gt=0, description="Longest pause before a crashed service is started again."
    )
    canary_interval_s: float = Field(
        2.0, gt=0, description="How often the supervisor asks each model for its canary row."
    )
    silence_timeout_s: float = Field(
        60.0, gt=0, description="How long a service or model may give no sign of life until it is restarted."
    )
    log_max_bytes: int = Field(
        20 * 2**20, ge=4096, description="Largest log file of one service; one older file is kept."
    )
    triton_staged_load: bool = Field(
        True,
        description="Start Triton with the default model alone and load the others while it answers; false = Triton answers when all are loaded.",
    )
    triton_venv: Path = Field(Path(".venv-triton"), description="Virtual environment of the GPU tier.")
    kafka_libs: Path = Field(Path(".kafka/libs"), description="Folder of Kafka's jars.")


class TelemetrySettings(Settings):
    """Logs and traces."""

    model_config = SettingsConfigDict(env_prefix="TWODOOR_LOG_")

    level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged."
    )
    format: Literal["json", "console"] = Field("json", description="One JSON object a line, or text for people.")
    trace_exporter: str = Field(
        "",
        description="Name of an installed OpenTelemetry trace exporter (`console`, `otlp_proto_http`, …); empty = no spans are recorded. Its own settings are OpenTelemetry's (`OTEL_EXPORTER_OTLP_ENDPOINT`).",
    )


ALL_SETTINGS: tuple[type[Settings], ...] = (
    ModelSettings, TritonSettings, GatewaySettings, KafkaSettings, ConsumerSettings, JobsSettings, StackSettings, TelemetrySettings,
)  # fmt: skip
OTHER_VARIABLES: Mapping[str, str] = {
    "TWODOOR_TEST_CRASHPOINT": "Tests only: `name` or `name:nth` of the moment at which the process kills itself.",
    "TWODOOR_TEST_STOPPOINT": "Tests only: `name` or `name:nth` of the moment at which the process stops itself (SIGSTOP).",
    "TWODOOR_SST2_DIR": "Folder of the SST-2 sentences for tests and for training the head.",
    "TWODOOR_CLIENT_URL": "Base URL of the gateway for the client and the `twodoor` command; default from TWODOOR_GATEWAY_HOST and _PORT.",
    "TWODOOR_CLIENT_API_KEY": "API key that the client and the `twodoor` command send as a bearer token; empty = none.",
}


def env_names(cls: type[Settings]) -> dict[str, str]:
    """Return field name → environment variable of one settings class."""
    prefix = cls.model_config.get("env_prefix", "")
    return {
        name: str(field.validation_alias) if field.validation_alias else f"{prefix}{name}".upper()
        for name, field in cls.model_fields.items()
    }


def load(cls: type[S]) -> S:
    """Read one settings class from the environment; raises ConfigError that names the variable and what is wrong."""
    try:
        return cls()
    except ValidationError as exc:
        names = env_names(cls)
        lines = [
            f"{names.get(str(e['loc'][0]), str(e['loc'][0]))}: {e['msg']}"
            if e["loc"]
            else e["msg"].removeprefix("Value error, ")
            for e in exc.errors(include_input=False, include_url=False)
        ]
        raise ConfigError("; ".join(lines)) from None


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the ``TWODOOR_*`` variables that are set and mean nothing: most often a typing error."""
    environ = os.environ if environ is None else environ
    known = {name for cls in ALL_SETTINGS for name in env_names(cls).values()} | set(OTHER_VARIABLES)
    return sorted(name for name in environ if name.startswith("TWODOOR_") and name not in known)
