"""The queue: jobs that wait for a device, which devices may take them, and in what order."""
