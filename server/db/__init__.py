"""The database: engine, sessions, column types, schema. Knows no slice's rules."""
