"""Where the numbers and samples of a run go: one class for each place, all behind `base.Tracker`."""
