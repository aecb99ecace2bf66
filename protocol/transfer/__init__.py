"""What both ends of a weight transport do alike: digests where the bytes lie, memory that is shared, groups of two. Knows torch."""
