"""Running a server: health, metrics, doctor, safety checks and backups."""
