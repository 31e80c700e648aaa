"""Jobs: requests to personalize, their states and their events."""
