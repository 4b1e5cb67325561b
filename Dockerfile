# Twodoor's own images, one target each: gateway, consumer, models (builds the repository), triton-cpu (CPU profile).
# Every Python package comes from a hashed lock and as a wheel: nothing is compiled, nothing unpinned is fetched.

# --- The CPU tier's packages. Nothing of the build stays in the images but the virtual environment. ---
FROM python:3.12-slim-bookworm AS server-packages
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/server.lock /build/
RUN python -m venv /opt/twodoor/venv \
 && /opt/twodoor/venv/bin/pip install --no-deps --only-binary :all: --require-hashes --requirement /build/server.lock

# --- What both doors share. ---
FROM python:3.12-slim-bookworm AS door
ENV PATH=/opt/twodoor/venv/bin:$PATH \
    PYTHONPATH=/opt/twodoor/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp
RUN groupadd --gid 10001 twodoor && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin twodoor
COPY --from=server-packages /opt/twodoor/venv /opt/twodoor/venv
COPY serving /opt/twodoor/app/serving
COPY jobs /opt/twodoor/app/jobs
COPY deploy/healthcheck.py deploy/with_secrets.py /opt/twodoor/
COPY deploy/create_bucket.py /opt/twodoor/app/create_bucket.py
WORKDIR /opt/twodoor/app
USER 10001:10001
STOPSIGNAL SIGTERM

FROM door AS gateway
COPY gateway /opt/twodoor/app/gateway
EXPOSE 8080
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
  CMD ["python", "/opt/twodoor/healthcheck.py", "8080", "/readyz"]
# A command may name another module: the one-shots `migrate` and `bucket` do.
ENTRYPOINT ["python", "/opt/twodoor/with_secrets.py"]
CMD ["gateway"]

FROM door AS consumer
COPY batch_consumer /opt/twodoor/app/batch_consumer
EXPOSE 8083
HEALTHCHECK --interval=5s --timeout=4s --start-period=60s --retries=3 \
  CMD ["python", "/opt/twodoor/healthcheck.py", "8083", "/healthz"]
ENTRYPOINT ["python", "/opt/twodoor/with_secrets.py"]
CMD ["batch_consumer"]

# --- Builds the model repository once, into a volume. ---
FROM python:3.12-slim-bookworm AS models
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Maven fetches the models' pinned artifacts. Debian drops old versions of a package, so a pinned one soon fails.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends maven \
 && rm -rf /var/lib/apt/lists/*
COPY requirements/cpu.lock /build/
RUN python -m venv /opt/twodoor/venv \
 && /opt/twodoor/venv/bin/pip install --no-deps --only-binary :all: --require-hashes --requirement /build/cpu.lock
ENV PATH=/opt/twodoor/venv/bin:$PATH \
    PYTHONPATH=/opt/twodoor/app \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HOME=/cache \
    MAVEN_OPTS=-Duser.home=/cache
RUN groupadd --gid 10001 twodoor \
 && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin twodoor \
 && install -d -o 10001 -g 10001 /models /cache
COPY serving /opt/twodoor/app/serving
COPY model_builder /opt/twodoor/app/model_builder
# A new named volume takes over owner and mode of the folder it covers.
VOLUME ["/models", "/cache"]
WORKDIR /cache
USER 10001:10001
ENTRYPOINT ["python", "-m", "model_builder"]

# --- Triton for machines without a GPU: the pip-installed server and the Python-based ONNX Runtime backend. ---
FROM python:3.11-slim-bookworm AS triton-cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
COPY requirements/triton.lock /build/
RUN python -m venv /opt/triton/venv \
 && /opt/triton/venv/bin/pip install --no-deps --only-binary :all: --require-hashes --requirement /build/triton.lock
COPY deploy/triton/layout.sh /build/
COPY local_stack/triton_backends/onnxruntime/model.py /build/
RUN /bin/sh /build/layout.sh /opt/triton/venv/lib/python3.11/site-packages 3.11 /build/model.py /opt/triton \
 && groupadd --gid 10001 triton \
 && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin triton
COPY deploy/triton/health.py /opt/triton/health.py
# The stub asks the first Python in PATH where its packages are; /usr/local/lib holds its libpython.
ENV PATH=/opt/triton/venv/bin:$PATH \
    LD_LIBRARY_PATH=/opt/triton/lib:/usr/local/lib \
    PYTHONNOUSERSITE=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    ORT_DISABLE_TELEMETRY=1 \
    HOME=/tmp
EXPOSE 8000 8001 8002
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=30s --start-period=600s --retries=3 \
  CMD ["python", "/opt/triton/health.py", "/models/repository", "127.0.0.1:8000"]
ENTRYPOINT ["/opt/triton/bin/tritonserver"]
# A stub that starts slowly (bulk instances have the lowest priority) hangs the whole load for good once Triton's 30 s are
# over: it waits for the end of a process that nobody ends.
CMD ["--model-repository=/models/repository", "--backend-directory=/opt/triton/backends", "--backend-config=python,stub-timeout-seconds=600", "--model-control-mode=explicit", "--load-model=*", "--strict-readiness=true", "--exit-on-error=false", "--disable-auto-complete-config", "--allow-gpu-metrics=false", "--exit-timeout-secs=10"]
