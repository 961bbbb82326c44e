"""One training step: it completes, or leaves everything unchanged. Start reading at `runner.StepRunner.run`."""
