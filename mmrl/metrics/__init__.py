"""What a reward table says as a whole: functions from table to named numbers."""
