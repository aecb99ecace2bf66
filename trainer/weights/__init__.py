"""The sending side of weight transports, one a file. `make_sender` finds them by name."""
