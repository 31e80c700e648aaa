"""The command `serve`: OpenAI's API on this device, for programs of its owner."""

from __future__ import annotations

import json
import secrets
import signal
from pathlib import Path
from typing import Annotated

import typer

from device_agent.cli.options import FeedbackOption, HomeOption, JsonOption, open_feedback
from device_agent.home import AgentHome
from shared.durable import write_durably
from shared.errors import BadRequest

LOOPBACK = ("127.0.0.1", "::1", "localhost")

app = typer.Typer(pretty_exceptions_enable=False)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Address to listen on; addresses other than loopback are not encrypted.")
    ] = LOOPBACK[0],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8321,
    queue: Annotated[int, typer.Option(min=1, max=1000, help="Requests in progress and waiting; more get 429.")] = 16,
    feedback: FeedbackOption = None,
    home: HomeOption = None,
    json_lines: JsonOption = False,
) -> None:
    """Serve stored adapters by OpenAI's API until interrupted; clients send the token that the first start prints."""
    from device_agent.serving.http import http_server, listen
    from device_agent.serving.models import DeviceModels
    from device_agent.serving.routes import DeviceRoutes

    agent_home = AgentHome.locate(home)
    agent_home.config()  # raises NotEnrolled
    ratings = open_feedback(agent_home, feedback)
    token, is_new = _token(agent_home.serve_token)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise BadRequest(f"cannot listen on {host}:{port} ({error}); choose another port with --port") from error
    routes = DeviceRoutes(DeviceModels(agent_home), token, queue, ratings)
    server = http_server(routes)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, server.handle_exit)  # stays in place: uvicorn raises the signal again after its stop
    url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
    if json_lines:
        facts = {"url": url, "token_file": str(agent_home.serve_token)}
        typer.echo(json.dumps(facts | ({"token": token} if is_new else {})))
    else:
        if is_new:
            typer.echo(f"token (it is not shown again; {agent_home.serve_token} has it): {token}")
        if host not in LOOPBACK:
            typer.echo(f"{host} is not a loopback address: texts and the token are sent without encryption", err=True)
        typer.echo(f"OpenAI's API is at {url}")
    server.run([listening])
    routes.close()


def _token(path: Path) -> tuple[str, bool]:
    """Returns the token, creating it on first use, and whether it is new. Raises BadRequest for an empty file."""
    try:
        token = path.read_text(encoding="utf-8-sig").strip()
    except FileNotFoundError:
        token = secrets.token_urlsafe(32)
        write_durably(path, f"{token}\n".encode())
        return token, True
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"{path} cannot be read ({error}); remove it for a new token") from error
    if not token:
        raise BadRequest(f"{path} is empty; remove it for a new token")
    return token, False
