"""The client: submit personalization jobs, watch them, and pull the adapters they make."""

from mobizo.client import Client

__all__ = ["Client"]
