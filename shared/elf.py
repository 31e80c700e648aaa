"""Reads from the first bytes of an ELF program which processor it runs on."""

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
    machine, platform_machine = elf_machine(header), platform.rpartition("-")[2]
    platform_machine = _ALIASES.get(platform_machine, platform_machine)
    return (
        machine
        if machine is not None and platform_machine in MACHINES.values() and machine != platform_machine
        else None
    )
