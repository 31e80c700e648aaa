# The default target is one image for server, worker and agent. `--target agent` is an image for devices, without torch: the
# agent and the native runner. Both were built with Buildah and run with Podman, on a Debian trixie with Python 3.11 under the
# name of the image below, because no registry could be reached.
# With `--build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` the server has torch without CUDA.
FROM python:3.11.14-slim-trixie AS wheels

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# Files that rarely change are copied first, so that the runner is compiled only when they or its sources change.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN apt-get update && apt-get install --yes --no-install-recommends g++ \
    && pip install --no-deps --constraint constraints.txt cmake executorch ninja packaging wheel
COPY device_agent/runner device_agent/runner
COPY deploy/runner_wheel.py deploy/
RUN python deploy/runner_wheel.py /wheels
COPY examples/data/LICENSE-vaderSentiment.txt examples/data/
COPY shared shared
COPY server server
COPY device_agent device_agent
COPY mobizo mobizo
COPY simulation simulation
RUN pip wheel --no-deps --wheel-dir /wheels .

FROM python:3.11.14-slim-trixie AS build

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
COPY --from=wheels /wheels /wheels
RUN python -m venv /opt/mobizo \
    && /opt/mobizo/bin/pip install --find-links /wheels --constraint constraints.txt 'mobizo[server,python-runtime]' \
    && /opt/mobizo/bin/pip uninstall --yes pip

FROM python:3.11.14-slim-trixie AS agent-build

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY constraints.txt ./
COPY --from=wheels /wheels /wheels
RUN python -m venv /opt/mobizo \
    && /opt/mobizo/bin/pip install --find-links /wheels --constraint constraints.txt 'mobizo[agent]' \
    && /opt/mobizo/bin/pip uninstall --yes pip

FROM python:3.11.14-slim-trixie AS agent

RUN pip uninstall --yes pip setuptools wheel \
    && useradd --uid 10001 --no-create-home --home-dir /var/lib/mobizo --shell /usr/sbin/nologin mobizo \
    && install -d -m 0700 -o mobizo -g mobizo /var/lib/mobizo
COPY --from=agent-build /opt/mobizo /opt/mobizo

USER 10001:10001
WORKDIR /var/lib/mobizo
ENV PATH=/opt/mobizo/bin:$PATH \
    MOBIZO_AGENT_HOME=/var/lib/mobizo/agent \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/mobizo"]
STOPSIGNAL SIGTERM
CMD ["mobizo-agent", "--help"]

# The final image has no compiler, no pip and no sources.
FROM python:3.11.14-slim-trixie

RUN pip uninstall --yes pip setuptools wheel \
    && useradd --uid 10001 --no-create-home --home-dir /var/lib/mobizo --shell /usr/sbin/nologin mobizo \
    && install -d -m 0700 -o mobizo -g mobizo /var/lib/mobizo
COPY --from=build /opt/mobizo /opt/mobizo

USER 10001:10001
WORKDIR /var/lib/mobizo
ENV PATH=/opt/mobizo/bin:$PATH \
    MOBIZO_HOME=/var/lib/mobizo/server \
    MOBIZO_AGENT_HOME=/var/lib/mobizo/agent \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/mobizo"]
STOPSIGNAL SIGTERM
CMD ["mobizo-server", "--help"]
