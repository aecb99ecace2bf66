"""What the processes of one host do: files, locks, descriptors and process trees."""
