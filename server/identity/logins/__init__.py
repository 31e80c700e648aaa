"""Logins by a code: a program without a token gets one once a signed-in person confirms its code (RFC 8628)."""
