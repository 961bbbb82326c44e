"""Running an optimizer step so that it is made whole, or leaves everything as it was before."""
