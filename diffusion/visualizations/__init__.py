"""Pictures of a report: what was made, and which steps turned a trajectory."""
