"""`mobizo-server key`: lists, rotates and retires the keys that sign programs."""

from __future__ import annotations

from typing import Annotated

import typer

from server.cli.console import Json, moment, open_home, tell, tell_rows
from server.identity.signing_keys.service import KeyFiles, KeyRepository, retire_keys, rotate_key
from server.registry.purge import sign_backlog
from shared.errors import BadRequest

app = typer.Typer()
keys = typer.Typer(help="Keys that sign programs.", no_args_is_help=True)
app.add_typer(keys, name="key")


@keys.command("list")
def list_keys(as_json: Json = False) -> None:
    """List the current and former signing keys."""
    settings, database = open_home()
    former_ids = KeyFiles(settings.key_path).former_ids()
    with database.reading() as session:
        every = KeyRepository(session).all()
        rows = [
            {
                "id": key.key_id,
                "state": "current" if key is every[-1] else "compromised" if key.compromised_at else "former",
                "private_key": "present" if key is every[-1] or key.key_id in former_ids else "absent",
                "created_at": moment(key.created_at),
                "compromised_at": moment(key.compromised_at),
                "retired_at": moment(key.retired_at),
            }
            for key in every
        ]
    database.close()
    tell_rows(as_json, rows, ("id", "state", "private_key", "created_at", "compromised_at", "retired_at"))


@keys.command()
def rotate(
    compromised: Annotated[
        bool, typer.Option("--compromised", help="The private key has leaked: every device must enroll again.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    as_json: Json = False,
) -> None:
    """Create a new signing key and use it from now on. Servers, workers and devices switch to it automatically."""
    if (
        compromised
        and not yes
        and not typer.confirm("Every device loses access and must enroll again with a new one-time token. Continue?")
    ):
        raise BadRequest("nothing was changed")
    settings, database = open_home()
    rotation = rotate_key(database, settings, compromised=compromised)
    versions = sign_backlog(database, settings)
    database.close()
    value = {
        "before": rotation.before,
        "after": rotation.after,
        "signed": rotation.signed,
        "adapter_versions": versions,
        "devices_shut_out": rotation.devices,
    }
    text = f"{rotation.after} is the new signing key; {rotation.signed} programs were re-signed."
    if versions:
        text += f" {versions} adapter versions were re-signed."
    if compromised:
        text += f" {rotation.before} is destroyed and no longer trusted; {rotation.devices} devices must enroll again."
    else:
        text += (
            f" The private half of the former key {rotation.before} stays in {KeyFiles(settings.key_path).former} "
            "until `mobizo-server key retire`."
        )
    tell(as_json, value, f"{text} Copy {settings.key_path} to every other host of this server.")


@keys.command()
def retire(as_json: Json = False) -> None:
    """Destroy the private halves of former keys on this host. Signed key rotations remain valid for devices."""
    settings, database = open_home()
    retired = retire_keys(database, settings)
    database.close()
    tell(
        as_json,
        {"retired": retired},
        f"destroyed: {', '.join(retired) or 'none (this host holds no former private key)'}",
    )
