"""Names the variables with which services reach object stores."""

CLOUDS = ("AWS_", "GOOGLE_", "GCS_", "AZURE_")
"""How their names begin."""
