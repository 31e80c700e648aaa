"""Phones over adb: the adb binary, the files kept on a phone, and its sensors."""
