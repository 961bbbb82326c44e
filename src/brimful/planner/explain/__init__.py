"""What a reader of a plan should know: notes, alternatives, and why nothing fits."""
