# A server for Intel Gaudi. Build from the root of the repository: make image DEVICE=gaudi
# The base brings the driver's libraries, Gaudi's own build of PyTorch with its NumPy, and Python 3.12: neither torch nor
# NumPy is replaced. Other releases, from 1.21 with torch 2.6.0 on, by the three arguments (docs/gaudi.md lists them).
ARG HABANA_VERSION=1.24.1
ARG HABANA_BUILD=482
ARG PYTORCH_VERSION=2.11.0
# BASE_IMAGE takes a digest (name:tag@sha256:...): docs/images.md says how to find it and check it.
ARG BASE_IMAGE=vault.habana.ai/gaudi-docker/${HABANA_VERSION}/ubuntu24.04/habanalabs/pytorch-installer-${PYTORCH_VERSION}:${HABANA_VERSION}-${HABANA_BUILD}

FROM ${BASE_IMAGE}
ARG PIP_ARGS=""
LABEL org.opencontainers.image.title="text-generation-inference (Gaudi)" \
      org.opencontainers.image.licenses="Apache-2.0"
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_BREAK_SYSTEM_PACKAGES=1
RUN python3 -c "import sys; sys.exit(0 if sys.version_info >= (3, 11) else 'Python 3.11 or later is needed: the base has %d.%d, as those on Ubuntu 22.04 have; take one on ubuntu24.04' % sys.version_info[:2])"
WORKDIR /build
COPY requirements.lock pyproject.toml README.md LICENSE ./
COPY docker/runtime_requirements.py docker/
RUN python3 docker/runtime_requirements.py --without-torch > runtime.lock \
    && python3 -c "from importlib.metadata import version; print(version('torch'), version('numpy'))" > before \
    && python3 -m pip install ${PIP_ARGS} --require-hashes --no-deps -r runtime.lock \
    && python3 -c "from importlib.metadata import version; print(version('torch'), version('numpy'))" > after \
    && cmp before after
COPY src src
# Gaudi's software and torch look their user up: number 1000 has a name here, if not Ubuntu's, then ours.
RUN python3 -m pip install ${PIP_ARGS} --no-deps --no-build-isolation . \
    && text-generation-launcher --version \
    && (getent passwd 1000 || useradd --uid 1000 --gid 0 --no-create-home --home-dir /home/tgi tgi) \
    && mkdir -p /data /usr/src /home/tgi/habana_logs \
    && chown -R 1000:0 /data /home/tgi /usr/src \
    && chmod -R g=u /data /home/tgi /usr/src
COPY docker/entrypoint.sh /tgi-entrypoint.sh
COPY docker/healthcheck.py /tgi-healthcheck.py
ENV HOME=/home/tgi \
    HABANA_LOGS=/home/tgi/habana_logs \
    PYTHONUNBUFFERED=1 \
    TGI_DEVICE=hpu \
    TGI_CACHE_DIR=/data/tgi \
    HF_HOME=/data \
    PORT=80 \
    PT_HPU_LAZY_MODE=1 \
    PT_HPU_WEIGHT_SHARING=0 \
    HABANA_VISIBLE_DEVICES=all \
    OMPI_MCA_btl_vader_single_copy_mechanism=none
# QUANT_CONFIG=./quantization_config/... and ./hqt_output are mounted here.
WORKDIR /usr/src
EXPOSE 80
# The runtime does not ask for root; devices whose files belong to a group need --group-add (docs/images.md).
USER 1000:0
HEALTHCHECK --interval=30s --timeout=10s --start-period=60m --retries=3 CMD ["/tgi-healthcheck.py"]
ENTRYPOINT ["/tgi-entrypoint.sh"]
CMD ["--json-output"]
