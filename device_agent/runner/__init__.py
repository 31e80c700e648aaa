"""The native runner: its C++ sources, and finding the installed one."""
