#!/usr/bin/env bash
# Builds Horovod, without MPI and GPUs, into the environment of a Python: horovod.sh PYTHON
#
# Its last release, of 2023, builds against TensorFlow 2.21 without its operations for XLA: they
# need a header of highwayhash, which TensorFlow's wheel leaves out. Its callbacks take the package
# keras for Keras 2. The build takes cmake and g++, and some minutes.
set -euo pipefail
python=$1 release=horovod-0.28.1
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --dest "$scratch" "${release/-/==}"
tar -xzf "$scratch/$release.tar.gz" -C "$scratch"
sed -i '/xla_mpi_ops/d' "$scratch/$release/horovod/tensorflow/CMakeLists.txt"
sed -i 's/from keras import/from tf_keras import/' "$scratch/$release/horovod/tensorflow/keras/callbacks.py"
export HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_GLOO=1 HOROVOD_DEBUG=1 # -O0, which compiles faster
export HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1
export MAKEFLAGS=${MAKEFLAGS:--j2}
"$python" -m pip install --quiet --no-build-isolation --no-deps "$scratch/$release"
