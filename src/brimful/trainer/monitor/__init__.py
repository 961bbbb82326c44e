"""What a run reports: records, progress, utilisation, trackers, callbacks."""
