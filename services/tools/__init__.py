"""What people run on a finished or running run: replay, evaluation."""
