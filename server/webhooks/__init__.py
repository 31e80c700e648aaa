"""Webhooks: messages about a tenant's events that are stored with the event and sent by workers."""
