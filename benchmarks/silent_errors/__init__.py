"""Programs whose answer was silently wrong, by the kind of the error."""
