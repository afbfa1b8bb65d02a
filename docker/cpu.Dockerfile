# A server for CPUs. Build from the root of the repository: make image DEVICE=cpu
# BASE_IMAGE takes a digest (name:tag@sha256:...): docs/images.md says how to find it and check it.
ARG BASE_IMAGE=python:3.11.13-slim-bookworm

FROM ${BASE_IMAGE} AS build
# PIP_ARGS: further arguments of pip, such as where to find a torch without CUDA, which makes the image much smaller.
ARG PIP_ARGS=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /build
RUN python -m venv /opt/tgi
ENV PATH=/opt/tgi/bin:$PATH
COPY requirements.lock requirements-cpu.lock requirements-cuda.lock pyproject.toml README.md LICENSE ./
COPY docker/runtime_requirements.py docker/needs_cuda.py docker/
# The packages first: they change seldom, and are by far the largest part. torch without CUDA where it is offered, else the
# usual one, which cannot be imported without CUDA's libraries.
RUN python docker/runtime_requirements.py > runtime.lock \
    && (pip install ${PIP_ARGS} --require-hashes --no-deps -r requirements-cpu.lock || echo "No torch without CUDA") \
    && pip install ${PIP_ARGS} --require-hashes --no-deps -r runtime.lock \
    && if python docker/needs_cuda.py; then \
           pip install ${PIP_ARGS} --require-hashes --no-deps -r requirements-cuda.lock; \
       fi
COPY src src
RUN pip install ${PIP_ARGS} --no-deps --no-build-isolation .

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="text-generation-inference (CPU)" \
      org.opencontainers.image.licenses="Apache-2.0"
# A compiler builds native kernels for the very CPU it runs on, once.
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
    TGI_DEVICE=cpu \
    TGI_CACHE_DIR=/data/tgi \
    HF_HOME=/data \
    PORT=80
WORKDIR /usr/src
EXPOSE 80
# The group of root and its rights let any user run it (--user, or what a cluster chooses).
USER 1000:0
HEALTHCHECK --interval=30s --timeout=10s --start-period=10m --retries=3 CMD ["/tgi-healthcheck.py"]
ENTRYPOINT ["/tgi-entrypoint.sh"]
CMD ["--json-output"]
