"""The server: compiles programs, keeps jobs, devices and adapters, and hands out files."""
