"""The daemon and what watches it: control socket, status display, logs, systemd and doctor."""
