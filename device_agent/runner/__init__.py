"""The native runner: its C++ sources, and finding, downloading or building it."""
