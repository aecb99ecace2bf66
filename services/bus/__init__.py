"""Delivers messages between the services over ZeroMQ sockets, driven from the event loop."""
