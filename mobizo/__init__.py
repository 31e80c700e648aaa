"""The client: submit personalization jobs, watch them, pull the adapters they make, and put them to use."""

from mobizo.client import Client, Event
from mobizo.pins import Pins
from mobizo.pulling import Format

__all__ = ["Client", "Event", "Format", "Pins"]
