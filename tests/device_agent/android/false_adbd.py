"""Listens as an adbd that Debian's cannot be: `false_adbd.py PORT distrustful|old`.

distrustful: asks the client for a signature, whatever comes, as a phone that does not trust this machine.
old: connects and offers no features, as Android before version 7.
"""

import os
import socket
import struct
import sys
import threading

AUTH, TOKEN = b"AUTH", 1
CONNECT, VERSION, MAX_DATA = b"CNXN", 0x01000000, 4096
BANNER = b"device::ro.product.name=old;ro.product.model=old;ro.product.device=old;"


def packet(command, first, second, data):
    """One packet of the adb protocol: six words, the last the command's complement, then the data."""
    (word,) = struct.unpack("<I", command)
    return struct.pack("<6I", word, first, second, len(data), sum(data) & 0xFFFFFFFF, word ^ 0xFFFFFFFF) + data


def answer(connection, kind):
    while head := connection.recv(24, socket.MSG_WAITALL):
        length = struct.unpack("<6I", head)[3]
        connection.recv(length, socket.MSG_WAITALL)
        if kind == "distrustful":
            connection.sendall(packet(AUTH, TOKEN, 0, os.urandom(20)))
        elif head.startswith(CONNECT):
            connection.sendall(packet(CONNECT, VERSION, MAX_DATA, BANNER))


def main(port, kind):
    with socket.create_server(("127.0.0.1", port)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection, kind), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
