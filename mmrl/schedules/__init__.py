"""Numbers that change during a run: functions of the clock."""
