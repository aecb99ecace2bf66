"""The processes of tether, and the only part of it that touches sockets, Redis, signals and settings."""
