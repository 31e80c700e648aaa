# One image for server and agent. Not built and not run yet: the machine this was written on has no container engine.
FROM python:3.11-slim

RUN useradd --create-home --uid 10001 mobizo
WORKDIR /opt/mobizo
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY examples/data/LICENSE-vaderSentiment.txt examples/data/
COPY shared shared
COPY server server
COPY device_agent device_agent
COPY mobizo mobizo
RUN pip install --no-cache-dir --constraint constraints.txt '.[server,python-runtime]' \
    && install -d -o mobizo -g mobizo /var/lib/mobizo

USER mobizo
ENV MOBIZO_HOME=/var/lib/mobizo/server MOBIZO_AGENT_HOME=/var/lib/mobizo/agent PYTHONUNBUFFERED=1
CMD ["mobizo-server", "--help"]
