"""What a run warns of: functions from the rows of its journal to sentences."""
