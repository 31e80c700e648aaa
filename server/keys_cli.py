"""`mobizo-server keys`: the keys that sign programs, and how one follows another."""

from __future__ import annotations

from typing import Annotated

import typer

from server.adapters.backlog import sign_backlog
from server.console import Json, moment, open_home, tell, tell_rows
from server.keys import KeyFiles
from server.succession.repository import KeyRepository
from server.succession.service import retire_keys, rotate_key
from shared.errors import BadRequest

app = typer.Typer()
keys = typer.Typer(help="Keys that sign programs.", no_args_is_help=True)
app.add_typer(keys, name="keys")


@keys.command("list")
def list_keys(as_json: Json = False) -> None:
    """List the keys that sign or signed programs."""
    settings, database = open_home()
    kept = KeyFiles(settings.key_path).kept()
    with database.reading() as session:
        found = KeyRepository(session).all()
        rows = [
            {
                "id": key.key_id,
                "state": "signs" if key is found[-1] else "compromised" if key.compromised_at else "handed over",
                "private_key": "here" if key is found[-1] else "kept aside" if key.key_id in kept else "not here",
                "created_at": moment(key.created_at),
                "compromised_at": moment(key.compromised_at),
                "retired_at": moment(key.retired_at),
            }
            for key in found
        ]
    database.close()
    tell_rows(as_json, rows, ("id", "state", "private_key", "created_at", "compromised_at", "retired_at"))


@keys.command()
def rotate(
    compromised: Annotated[
        bool, typer.Option("--compromised", help="the key is in foreign hands: every device must enrol again")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Sign with a new key from now on; running servers and workers take it up, and devices follow by themselves."""
    if (
        compromised
        and not yes
        and not typer.confirm(
            "Every device is shut out and must enrol again, with a new one-time token or code. Go on?"
        )
    ):
        raise BadRequest("nothing was changed")
    settings, database = open_home()
    done = rotate_key(database, settings, compromised=compromised)
    versions = sign_backlog(database, settings)
    database.close()
    value = {
        "before": done.before,
        "after": done.after,
        "signed": done.signed,
        "adapter_versions": versions,
        "devices_shut_out": done.devices,
    }
    text = f"{done.after} signs from now on; {done.signed} programs and runners are signed anew."
    if versions:
        text += f" So are {versions} versions of adapters."
    if compromised:
        text += f" {done.before} is destroyed and trusted no more; {done.devices} devices must enrol again."
    else:
        text += (
            f" {done.before} handed over to it; its private half lies in {KeyFiles(settings.key_path).former} until "
            "`mobizo-server keys retire`."
        )
    tell(as_json, value, f"{text} Copy {settings.key_path} to every other host of this server.")


@keys.command()
def retire(as_json: Json = False) -> None:
    """Destroy the private halves of former keys on this host. Devices still follow the statements that they signed."""
    settings, database = open_home()
    retired = retire_keys(database, settings)
    database.close()
    tell(as_json, {"retired": retired}, f"destroyed: {', '.join(retired) or 'none was here'}")
