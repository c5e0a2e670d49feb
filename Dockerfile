# docker build -t mimo-epd . && docker run --init --shm-size 1g -p 8000:8000 mimo-epd
# The whole pipeline in one container; other roles are other arguments (docs/deploy.md). Embeddings lie in shared memory:
# the encoder's arena (256 MiB by default) does not fit Docker's 64 MB.
FROM python:3.11-slim AS build
# Of pyproject.toml: stores of embeddings and KV in Redis, traces, pictures of phones.
ARG EXTRAS=redis,otel,heif
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY preprocess preprocess
COPY encoder encoder
COPY epd epd
COPY cli cli
COPY configs configs
COPY training training
RUN python -m venv /opt/mimo && /opt/mimo/bin/pip install --no-cache-dir ".[${EXTRAS}]"

FROM python:3.11-slim
# libgomp1: torch's OpenMP runtime. g++ compiles the CPU kernels for the processor they find. The media libraries ship
# inside their wheels. The user has a number, so that Kubernetes can tell that it is not root.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home mimo \
    && install -d -o mimo -g mimo /var/cache/mimo
COPY --from=build /opt/mimo /opt/mimo
# Inside a container loopback reaches nobody, so all its interfaces are bound; publish the port as you see fit.
# With a read-only root, mount something writable at the cache and at /tmp.
ENV PATH=/opt/mimo/bin:$PATH \
    MIMO_CACHE_DIR=/var/cache/mimo \
    HEALTH_URL=http://127.0.0.1:8000/ready
USER 10001:10001
# The API, prefill, decode, encoder-worker, and probes of these three.
EXPOSE 8000 7001 7002 7003 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(os.environ['HEALTH_URL'], timeout=4)"]
ENTRYPOINT ["mimo"]
CMD ["serve", "--mode", "epd", "--host", "0.0.0.0"]
