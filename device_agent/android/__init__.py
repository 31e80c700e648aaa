"""Phones over adb: the adb binary, and the files kept on a phone."""
