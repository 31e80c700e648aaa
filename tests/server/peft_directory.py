"""Adapters as PEFT directories for tests that load them with stock tools."""

from server.registry.exports.peft import peft_files


def write_peft(recipe, shape, flat, a_sha256, directory, calibration=None):
    """Writes an adapter's PEFT files into `directory`. Raises the errors of `peft_files`."""
    files = peft_files(recipe, shape, flat, a_sha256, calibration)
    directory.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (directory / name).write_bytes(data)
