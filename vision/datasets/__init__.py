"""Data sets: functions that read files and return prompts."""
