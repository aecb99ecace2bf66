"""What the services of tether say to each other, and the rules they hold each other to.

Pure data and pure functions: no sockets, no torch, nothing else of the project.
"""
