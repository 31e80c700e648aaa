"""A converter for tests of what surrounds it: same command line, same output, small files in no time.

`converter.json` in the base's source makes it fail, crash, hang or lie. Every start is a line of `conversions.log`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from shared.canonical import file_sha256


def say(message: dict) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def main() -> int:
    order, raw_b, source, directory, *_ = (Path(argument) for argument in sys.argv[1:])
    path = source / "converter.json"
    behaviour = json.loads(path.read_text()) if path.exists() else {}
    with (source / "conversions.log").open("a") as log:  # whoever sees it may change the behaviour of the next
        log.write(f"{os.getpid()}\n")
    say({"stage": "read", "fraction": 0.0})
    if behaviour.get("hang"):
        time.sleep(600)
    if behaviour.get("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if "error" in behaviour:
        say({"error": behaviour["error"]})
        return 1
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(raw_b.read_bytes() * 10)
    (directory / "config.json").write_text(json.loads(order.read_text())["recipe"]["base"]["name"])
    files = [
        {"path": file.name, "size": file.stat().st_size, "sha256": file_sha256(file)}
        for file in sorted(directory.iterdir())
    ]
    if "tamper" in behaviour:
        (directory / "config.json").write_text("something else")
    if "path" in behaviour:
        files[0]["path"] = behaviour["path"]
    say({"files": files})
    return 0


if __name__ == "__main__":
    sys.exit(main())
