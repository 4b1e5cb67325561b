#!/bin/sh
# Lays out Triton's CPU tier from the pip-installed server: layout.sh SITE_PACKAGES PYTHON_VERSION MODEL_PY TARGET
# TARGET gets bin/tritonserver, lib/ (the server's bundled libraries) and backends/{python,onnxruntime}.
set -eu
site=$1 python=$2 model=$3 target=$4
server=$site/pytriton/tritonserver
mkdir -p "$target/bin" "$target/backends/python" "$target/backends/onnxruntime"
ln -sfn "$server/bin/tritonserver" "$target/bin/tritonserver"
ln -sfn "$site/nvidia_pytriton.libs" "$target/lib"
# Copies: Triton refuses a backend's library that is a link out of the backends folder. The stub is built per Python
# version, and one that does not match cannot import the backend's packages.
cp "$server/backends/python/libtriton_python.so" "$server/backends/python/triton_python_backend_utils.py" \
  "$server/python_backend_stubs/$python/triton_python_backend_stub" "$target/backends/python/"
cp "$model" "$target/backends/onnxruntime/model.py"
chmod -R a+rX "$target/backends"
