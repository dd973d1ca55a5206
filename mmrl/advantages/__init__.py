"""From rewards to advantages: functions from table to table. Their order is the method."""
