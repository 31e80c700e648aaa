# The default target is one image for server, worker and agent. `--target agent` is an image for devices, without torch: the
# agent and the native runner. Both were built with Buildah and run with Podman, on a Debian trixie with Python 3.11 under the
# name of the image below, because no registry could be reached.
# With `--build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu` the server has torch without CUDA.
FROM python:3.11.14-slim-trixie AS build

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/mobizo
# Files that rarely change are copied first, so that the dependencies are reinstalled only when they change.
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples/data/LICENSE-vaderSentiment.txt examples/data/
COPY shared shared
COPY server server
COPY device_agent device_agent
COPY mobizo mobizo
COPY simulation simulation
RUN /opt/mobizo/bin/pip install --constraint constraints.txt '.[server,python-runtime]' \
    && /opt/mobizo/bin/pip uninstall --yes pip

FROM python:3.11.14-slim-trixie AS agent-build

ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && python -m venv /opt/mobizo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples/data/LICENSE-vaderSentiment.txt examples/data/
COPY shared shared
COPY server server
COPY device_agent device_agent
COPY mobizo mobizo
COPY simulation simulation
# The runner is built with downloaded CMake, Ninja and ExecuTorch, of which its libraries remain.
RUN /opt/mobizo/bin/pip install --constraint constraints.txt '.[agent]' \
    && /opt/mobizo/bin/mobizo-agent build-runner --home /tmp/home \
    && mv "$(dirname "$(find /tmp/home -name mobizo-runner -type f)")" /opt/mobizo/runner \
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
    MOBIZO_AGENT_RUNNER=/opt/mobizo/runner \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/mobizo"]
STOPSIGNAL SIGTERM
CMD ["mobizo-agent", "--help"]

# The final image has no compiler, no pip and no sources. PostgreSQL's client programs are for `mobizo-server backup`.
FROM python:3.11.14-slim-trixie

RUN apt-get update \
    && apt-get install --yes --no-install-recommends postgresql-client-17 \
    && rm -rf /var/lib/apt/lists/* \
    && pip uninstall --yes pip setuptools wheel \
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
