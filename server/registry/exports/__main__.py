"""`python -m server.registry.exports ORDER.json RAW_B SOURCE OUT_DIR [CALIBRATION]`: one merged model as a process
of its own.

Prints one JSON object a line: {"stage", "fraction"} as it goes, {"files"} at the end, or {"error": {"code", "detail"}}
with exit code 1. To stop it, kill the process.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

from server.compiler.worker_protocol import Lines
from server.registry.exports.converter_process import Order
from server.registry.exports.gguf_model import merge_gguf
from server.registry.exports.merge import merge
from shared.errors import ConversionFailed, MobizoError
from shared.protocol import MergedForm
from shared.zo.calibration import read_calibration
from shared.zo.lora import flat_size, load_adapter


def main(arguments: list[str]) -> int:
    """Merges as the arguments say; returns the exit code."""
    lines = Lines()
    order_path, raw_b, source, directory, *rest = arguments
    try:
        order = Order.model_validate_json(Path(order_path).read_bytes())
        flat = load_adapter(Path(raw_b).read_bytes(), flat_size(order.recipe, order.shape))
        calibration = read_calibration(Path(rest[0])) if rest else None
        about = order.recipe, order.shape, flat, order.a_sha256, source, Path(directory)
        if order.form is MergedForm.DIRECTORY:
            files = merge(*about, lines.stage, calibration=calibration)
        else:
            files = merge_gguf(*about, order.form, lines.stage, calibration)
    except Exception as error:
        if not isinstance(error, MobizoError):
            traceback.print_exc()
            error = ConversionFailed(f"the converter stopped: {type(error).__name__}: {error}")
        lines.say({"error": {"code": error.code, "detail": error.detail}})
        return 1
    lines.say({"files": [file.model_dump() for file in files]})
    return 0


if __name__ == "__main__":
    if len(sys.argv) not in (5, 6):
        sys.exit("usage: python -m server.registry.exports ORDER.json RAW_B SOURCE OUT_DIR [CALIBRATION]")
    sys.exit(main(sys.argv[1:]))
