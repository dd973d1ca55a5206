"""What a run writes: metrics, console, HTML pages, trackers, model cards."""
