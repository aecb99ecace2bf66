"""Memory of a rank and of a host by arithmetic."""
