"""Runs an episode's commands on a machine of another company, by that company's own client."""
