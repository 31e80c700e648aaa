"""The database: engine, sessions, column types and schema."""
