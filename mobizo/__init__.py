"""The client: submit personalization jobs, watch them, and pull the adapters they make."""

from mobizo.client import Client
from mobizo.pins import Pins

__all__ = ["Client", "Pins"]
