# One image for server, worker and agent. It was not built on the development machine, which has no container engine.
FROM python:3.11.14-slim-trixie AS build

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
