"""The daemon, its status, logs and systemd unit, and the installation check."""
