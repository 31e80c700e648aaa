"""When this device may train: sensors, rules and their evaluation."""
