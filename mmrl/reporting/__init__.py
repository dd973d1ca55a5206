"""The output of a run: metrics, console, HTML pages, trackers, model cards."""
