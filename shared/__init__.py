"""The contract between server, device and client: words, formats, signatures and reference arithmetic.

Imports neither torch nor a web framework, so that an agent or any client can have it.
"""
