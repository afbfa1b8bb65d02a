# A server for NVIDIA GPUs. Build from the root of the repository: make image DEVICE=cuda
# CUDA's libraries come with torch; the driver's are mounted by NVIDIA's container runtime (docker run --gpus all).
# BASE_IMAGE takes a digest (name:tag@sha256:...): docs/images.md says how to find it and check it.
ARG BASE_IMAGE=python:3.12.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
RUN python -m venv /opt/tgi
ENV PATH=/opt/tgi/bin:$PATH
COPY requirements.lock requirements-cuda.lock pyproject.toml README.md LICENSE ./
COPY docker/runtime_requirements.py docker/
RUN python docker/runtime_requirements.py > runtime.lock \
    && pip install ${PIP_ARGS} --require-hashes --no-deps -r runtime.lock -r requirements-cuda.lock
COPY src src
RUN pip install ${PIP_ARGS} --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="text-generation-inference (CUDA)" \
      org.opencontainers.image.licenses="Apache-2.0"
# Triton compiles the little program that launches a kernel.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --gid 0 --create-home tgi \
    && mkdir -p /data /usr/src \
    && chown -R 1000:0 /data /home/tgi /usr/src \
    && chmod -R g=u /data /home/tgi /usr/src
COPY --from=build /opt/tgi /opt/tgi
COPY docker/entrypoint.sh /tgi-entrypoint.sh
COPY docker/healthcheck.py /tgi-healthcheck.py
ENV PATH=/opt/tgi/bin:$PATH \
    HOME=/home/tgi \
    PYTHONUNBUFFERED=1 \
    TGI_DEVICE=cuda \
    TGI_CACHE_DIR=/data/tgi \
    HF_HOME=/data \
    PORT=80 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /usr/src
EXPOSE 80
USER 1000:0
HEALTHCHECK --interval=30s --timeout=10s --start-period=30m --retries=3 CMD ["/tgi-healthcheck.py"]
ENTRYPOINT ["/tgi-entrypoint.sh"]
CMD ["--json-output"]
