"""Listens as an adbd does, and asks the client for a signature, whatever comes: `false_adbd.py PORT`.

So does a phone that was not told to trust this machine. Debian's adbd asks nobody.
"""

import os
import socket
import struct
import sys
import threading

AUTH, TOKEN = b"AUTH", 1


def packet(command, first, data):
    """One packet of the adb protocol: six words, the last the command's complement, then the data."""
    (word,) = struct.unpack("<I", command)
    return struct.pack("<6I", word, first, 0, len(data), sum(data) & 0xFFFFFFFF, word ^ 0xFFFFFFFF) + data


def answer(connection):
    while head := connection.recv(24, socket.MSG_WAITALL):
        length = struct.unpack("<6I", head)[3]
        connection.recv(length, socket.MSG_WAITALL)
        connection.sendall(packet(AUTH, TOKEN, os.urandom(20)))


def main(port):
    with socket.create_server(("127.0.0.1", port)) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]))
