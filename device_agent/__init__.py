"""The device agent: leases a job, trains by running its program, uploads only LoRA-B."""
