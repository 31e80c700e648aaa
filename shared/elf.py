"""Which processor an ELF program is for, by its first bytes."""

from __future__ import annotations

HEADER_BYTES = 20
MACHINES = {3: "x86", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}  # e_machine, as `uname -m` names it
_ALIASES = {"arm64": "aarch64", "armv7l": "arm", "i686": "x86"}


def elf_machine(header: bytes) -> str | None:
    """Returns the machine of a little-endian ELF file from its first HEADER_BYTES; None for anything else."""
    if len(header) < HEADER_BYTES or not header.startswith(b"\x7fELF") or header[5] != 1:
        return None
    return MACHINES.get(int.from_bytes(header[18:20], "little"))


def wrong_machine(header: bytes, platform: str) -> str | None:
    """Returns the machine of an ELF file that cannot run on `platform`, such as android-arm64.

    None if it can run there, or if either machine is unknown.
    """
    found, wanted = elf_machine(header), platform.rpartition("-")[2]
    wanted = _ALIASES.get(wanted, wanted)
    return found if found is not None and wanted in MACHINES.values() and found != wanted else None
