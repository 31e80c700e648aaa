"""Data sets in the agent's home: reads files of common formats, splits their records and stores them atomically."""
