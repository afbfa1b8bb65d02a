#!/bin/sh
# What the images run: prepares the environment, then becomes the launcher (exec), so that signals reach it and
# arguments stay as they were given.
set -eu

say() { printf '%s\n' "$1" >&2; }

# SageMaker starts an image with the word `serve` and names the model in HF_MODEL_ID; the launcher maps its variables.
if [ "${1:-}" = serve ]; then
    shift
    if [ -z "${HF_MODEL_ID:-}" ]; then
        say "HF_MODEL_ID must be set"
        exit 1
    fi
fi

# Libraries of a driver are mounted when the container starts.
if [ "$(id -u)" = 0 ]; then
    ldconfig 2>/dev/null || true
fi

# A folder that Docker made for a volume belongs to root.
data=${HF_HOME:-/data}
if ! mkdir -p "$data" 2>/dev/null || [ ! -w "$data" ]; then
    say "warning: user $(id -u) cannot write to $data: downloads are kept in the container and lost with it"
    say "warning: make the volume's folder writable (chown $(id -u) FOLDER), or add --user 0 to docker run"
    HF_HOME=${TMPDIR:-/tmp}/tgi-data
    case ${TGI_CACHE_DIR:-$data/tgi} in
    "$data"/*) TGI_CACHE_DIR=$HF_HOME/tgi ;; # one that was chosen to be elsewhere stays
    esac
    export HF_HOME TGI_CACHE_DIR
    mkdir -p "$HF_HOME"
fi
if [ ! -w "${HOME:-/}" ]; then
    HOME=${TMPDIR:-/tmp}
    export HOME
fi

# Cards that share a model meet inside graphs only with this.
if [ "${TGI_DEVICE:-}" = hpu ] && [ -z "${PT_HPU_ENABLE_LAZY_COLLECTIVES:-}" ]; then
    before=
    for argument in "$@" ${SHARDED:+"--sharded=$SHARDED"}; do
        if [ "$argument" = --sharded=true ] || [ "$before $argument" = "--sharded true" ]; then
            say "--sharded true: PT_HPU_ENABLE_LAZY_COLLECTIVES=1"
            export PT_HPU_ENABLE_LAZY_COLLECTIVES=1
        fi
        before=$argument
    done
fi

exec text-generation-launcher "$@"
