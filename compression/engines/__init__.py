"""Engine wrappers that watch over what makes rollouts cheap."""
