"""Messages between the services: ZeroMQ sockets driven from the event loop."""
