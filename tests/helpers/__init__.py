"""Models, jobs and traces small enough for tests."""
