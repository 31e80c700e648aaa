"""How workers learn that a program waits, and who runs it: a port with two engines."""
