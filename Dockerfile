# docker run --shm-size 1g -p 8000:8000 IMAGE
# Embeddings lie in shared memory: the encoder's arena (256 MiB by default) does not fit Docker's 64 MB.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY preprocess preprocess
COPY encoder encoder
COPY epd epd
COPY cli cli
COPY configs configs
RUN python -m venv /opt/mimo && /opt/mimo/bin/pip install --no-cache-dir .

FROM python:3.11-slim
# libgomp1: torch's OpenMP runtime. g++ compiles the CPU kernels for the processor they find. The media libraries ship
# inside their wheels.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libgomp1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home mimo
COPY --from=build /opt/mimo /opt/mimo
ENV PATH=/opt/mimo/bin:$PATH
USER mimo
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
    CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=2)"
ENTRYPOINT ["mimo"]
# Inside a container loopback reaches nobody, so all its interfaces are bound; publish the port as you see fit.
ENV MIMO_GATEWAY__HOST=0.0.0.0
CMD ["serve", "--mode", "epd"]
