"""`bench registry`: how fast adapters are published, downloaded, scored and verified."""
