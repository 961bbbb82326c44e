"""What a real GPU does, recorded beside what is predicted for it."""
